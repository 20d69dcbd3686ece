"""The unmodified `juwels` profile on the look-alike: through Snakemake, with real training."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, wait_for
from mini_pipeline import MINI, Pipeline
from PIL import Image
from slurm_cluster import ACCOUNT
from slurm_run import SlurmRun

from maect.launch.record import progress, read_job

pytestmark = pytest.mark.cluster

MAE = MINI["runs"]["mae_tiny"]
BOTH = ["mae_tiny", "ct_min_tiny"]


@pytest.fixture
def pipeline(run: SlurmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """An experiment in a folder of its own, by the profile."""
    monkeypatch.setenv("MAECT_ACCOUNT", ACCOUNT)
    profile = ROOT / "cluster_profiles/juwels"
    return Pipeline(tmp_path / "pipeline", dict(MINI), changes=(), profile=profile)


def test_the_job_of_a_pretraining_is_what_the_site_expects(pipeline, run, tmp_path):
    """A budget, whole nodes, 4 devices, its time limit. Here it pends: nobody has to train."""
    for number in range(8):
        image = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (30 * number, 9, 9)).save(image)
    splits = {"train": {"images": str(tmp_path / "images")}}
    few = {"mae_tiny": MAE | {"set": {"batch_size": 8}}}
    pipeline.experiment = {"datasets": {"mine": {"splits": splits}}, "runs": few}
    live = ("squeue", "-h", "-o", "%i")
    partition = ("scontrol", "update", "PartitionName=booster")
    run.slurm.run(*partition, "State=DOWN")
    try:
        snakemake = pipeline.start(f"{pipeline.results}/runs/mae_tiny/done")
        wait_for(lambda: run.slurm.run(*live) or snakemake.poll() is not None, 120)
        text = run.slurm.run("scontrol", "show", "job", run.slurm.run(*live))
        os.killpg(snakemake.pid, signal.SIGINT)
        snakemake.wait(60)
        wait_for(lambda: not run.slurm.run(*live), 60)
    finally:
        run.slurm.run(*partition, "State=UP")
    shown = dict(word.split("=", 1) for word in text.split() if "=" in word)
    wanted = {"Partition": "booster", "Account": ACCOUNT, "NumNodes": "1-1", "NumTasks": "4",
              "CPUs/Task": "12", "TimeLimit": "1-00:00:00", "OverSubscribe": "NO",
              "TresPerNode": "gres:gpu:4"}  # fmt: skip
    assert {key: shown[key] for key in wanted} == wanted


@pytest.mark.slow
def test_whole_experiment_through_the_profile(pipeline, run):
    """Every stage and kind of evaluation; Snakemake is killed once on the way."""
    pipeline.experiment |= {
        "evaluate": [{"runs": BOTH, "protocols": ["knn", "linear_probe"]}],
        "protocols": {"linear_probe": {"epochs": 1, "warmup_epochs": 0}},
    }
    first = pipeline.start("evaluations")
    folder = pipeline.results / "runs/mae_tiny"
    wait_for(lambda: progress(folder, read_job(folder)), 300)
    first.kill()
    first.wait(30)
    pipeline.complete("evaluations", timeout=1500)

    def read(name: str) -> dict:
        return json.loads((pipeline.results / name).read_text())

    for name in BOTH:
        assert read(f"runs/{name}/run.json")["world_size"] == 4
        assert read(f"evaluations/{name}/knn.json")["metrics"]["knn"] > 10
        assert not read(f"runs/{name}/job.json")["earlier"]
    wait_for(lambda: not run.slurm.run("squeue", "-h"))


@pytest.mark.slow  # the executor is installed
def test_the_executor_takes_ordinary_rules_and_trainings_submit_themselves(
    pipeline, run, tmp_path, monkeypatch
):
    """Snakemake's own SLURM executor, as docs/why_a_launcher.md describes it."""
    plugin = tmp_path / "plugin"
    wanted = ["snakemake-executor-plugin-slurm", "snakemake-executor-plugin-slurm-jobstep"]
    install = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--no-deps"]
    install += ["--python", sys.executable, "--target", plugin, *wanted]
    done = subprocess.run(install, capture_output=True, text=True, cwd=tmp_path)
    if done.returncode and ("error sending request" in done.stderr or "offline" in done.stderr):
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    # The executor's job step drops SLURM_CONF, by which alone this cluster is found.
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={run.slurm.conf} exec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    pipeline.experiment |= {
        "runs": {"mae_tiny": MAE},
        "evaluate": [{"runs": ["mae_tiny"], "protocols": ["low_shot"]}],
        "tables": {"low_shot": ["mae_tiny"]},
    }
    options = ["--executor", "slurm", "--jobs", "8", "--default-resources"]
    options += ["slurm_partition=booster", f"slurm_account={ACCOUNT}", "mem_mb=4000", "runtime=60"]
    said = pipeline.complete("tables", *options)
    assert "tiny,mae," in (pipeline.results / "tables/low_shot.csv").read_text()
    submitted = dict(re.findall(r"SLURM jobid (\d+) .*?rule_(\w+)/", said))
    assert {*submitted.values()} == {"write_images", "write_shards", "table"}
    training = read_job(pipeline.results / "runs/mae_tiny")
    assert training is not None and training.id not in submitted
