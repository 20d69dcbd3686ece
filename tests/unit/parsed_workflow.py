"""The rules and jobs of an experiment as Snakemake understands them."""

import contextlib
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yte

ROOT = Path(__file__).parents[2]


def read_profile(name: str) -> dict[str, Any]:
    """A profile as Snakemake reads it."""
    text = (ROOT / "cluster_profiles" / name / "config.yaml").read_text(encoding="utf-8")
    return yte.process_yaml(text, require_use_yte=True)


@functools.cache
def parsed(resources: str = "{}") -> dict[str, Any]:
    """Rules and jobs of `digits`.

    Args:
        resources: of each rule, in place of its own, as JSON.
    """
    words = [sys.executable, __file__, resources]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def main(resources: str) -> None:
    from snakemake import api
    from snakemake.settings import types as settings

    quiet = settings.OutputSettings(quiet={settings.Quietness.ALL})
    with contextlib.redirect_stdout(sys.stderr), api.SnakemakeApi(quiet) as snakemake:
        loaded = snakemake.workflow(
            resource_settings=settings.ResourceSettings(
                cores=1, overwrite_resources=json.loads(resources)
            ),
            config_settings=settings.ConfigSettings(config={"experiment": "digits"}),
            snakefile=ROOT / "Snakefile",
        )
        loaded.dag(settings.DAGSettings(forceall=True)).summary()  # builds the DAG, runs nothing
        workflow = loaded._workflow
        rules = {
            rule.name: {
                "command": rule.shellcmd,
                "log": list(map(str, rule.log)),
                "benchmark": rule.benchmark and str(rule.benchmark),
                "resources": sorted(rule.resources),
                "priority": rule.priority,
                "input": [] if rule.shellcmd else list(map(str, rule.input)),
            }
            for rule in workflow.rules
        }
        jobs = {
            f"{job.rule.name} {' '.join(job.output)}": {
                "params": [repr(item) for item in job.params],
                "input": list(job.input),
                "resources": {key: str(value) for key, value in job.resources.items()},
            }
            for job in workflow.dag.jobs
        }
    print(json.dumps({"rules": rules, "jobs": jobs}))


if __name__ == "__main__":
    main(sys.argv[1])
