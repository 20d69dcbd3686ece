"""Snakemake's own SLURM executor for ordinary rules, as docs/why_a_launcher.md describes it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import ROOT
from slurm_cluster import ACCOUNT

from maect.launch.record import read_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # the executor is installed

UV = Path(sys.executable).with_name("uv")
EXPERIMENT = {
    "datasets": {
        "digits": {"kind": "digits", "resize": 16, "splits": {"train": {"shards": 2}, "val": {}}}
    },
    "runs": {"mae_tiny": {"recipe": "mae", "size": "tiny", "set": {"epochs": 1}}},
    "evaluate": [{"runs": ["mae_tiny"], "protocols": ["low_shot"]}],
    "tables": {"low_shot": ["mae_tiny"]},
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the executor, which maect itself does not need."""
    folder = tmp_path_factory.mktemp("plugin")
    wanted = ["snakemake-executor-plugin-slurm", "snakemake-executor-plugin-slurm-jobstep"]
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    done = subprocess.run(
        [*install, "--target", folder, *wanted], capture_output=True, text=True, cwd=folder
    )
    if done.returncode and ("error sending request" in done.stderr or "offline" in done.stderr):
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_executor_takes_ordinary_rules_and_trainings_submit_themselves(run, plugin, tmp_path):
    # The executor's job step drops SLURM_CONF, by which alone this cluster is found.
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={run.slurm.conf} exec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    file, results = tmp_path / "digits.yaml", tmp_path / "results"
    file.write_text(yaml.safe_dump(EXPERIMENT | {"storage": str(results)}, sort_keys=False))
    (tmp_path / "envs").symlink_to(ROOT / "envs")
    words = [sys.executable, "-m", "snakemake", "tables", "--snakefile", ROOT / "Snakefile"]
    words += ["--profile", ROOT / "cluster_profiles/juwels", "--config", f"experiment={file}"]
    words += ["--executor", "slurm", "--jobs", "8", "--default-resources"]
    words += ["slurm_partition=booster", f"slurm_account={ACCOUNT}", "mem_mb=4000", "runtime=60"]
    environment = os.environ | {"MAECT_ACCOUNT": ACCOUNT, "PYTHONPATH": str(plugin)}
    environment["PATH"] = f"{srun.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "tiny,mae," in (results / "tables/low_shot.csv").read_text()
    submitted = dict(re.findall(r"SLURM jobid (\d+) .*?rule_(\w+)/", done.stderr))
    assert {*submitted.values()} == {"write_images", "write_shards", "table"}
    training = read_job(results / "runs/mae_tiny")
    assert training is not None and training.id not in submitted
