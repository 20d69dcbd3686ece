"""The unmodified `juwels` profile on the look-alike: through Snakemake, with real training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import ROOT, wait_for
from slurm_cluster import ACCOUNT

from maect.launch.record import progress, read_job

pytestmark = pytest.mark.cluster

ONE_EPOCH = {"epochs": 1}
EXPERIMENT = {
    "datasets": {
        "digits": {"kind": "digits", "resize": 16, "splits": {"train": {"shards": 2}, "val": {}}}
    },
    "runs": {
        "mae_tiny": {"recipe": "mae", "size": "tiny", "set": ONE_EPOCH},
        "head_tiny": {"recipe": "head_min", "size": "tiny", "from": "mae_tiny", "set": ONE_EPOCH},
        "ct_tiny": {"recipe": "ct_min", "size": "tiny", "from": "head_tiny", "set": ONE_EPOCH},
    },
    "evaluate": [{"runs": ["mae_tiny", "ct_tiny"], "protocols": ["knn", "linear_probe"]}],
    "protocols": {"linear_probe": {"epochs": 1, "warmup_epochs": 0}},
}


class Pipeline:
    """Every stage on the digits, with few epochs, in a folder of its own."""

    def __init__(self, folder: Path, run) -> None:
        self.folder, self.slurm = folder, run.slurm
        experiment = EXPERIMENT | {"storage": str(folder / "results")}
        folder.mkdir()
        (folder / "digits.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
        (folder / "envs").symlink_to(ROOT / "envs")

    def start(self, target: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        words += ["--profile", str(ROOT / "cluster_profiles/juwels"), "--directory", "."]
        words += [target, "--config", f"experiment={self.folder / 'digits.yaml'}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                words, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, "MAECT_ACCOUNT": ACCOUNT}, text=True,
            )  # fmt: skip

    def completes(self, snakemake: "subprocess.Popen[str]", seconds: float) -> None:
        try:
            assert snakemake.wait(seconds) == 0, (self.folder / "log").read_text()[-6000:]
        finally:
            snakemake.kill()

    def read(self, name: str) -> dict:
        return json.loads((self.folder / "results" / name).read_text())

    def live(self) -> list[str]:
        return self.slurm.run("squeue", "-h", "-o", "%i %j").splitlines()


@pytest.fixture
def pipeline(run, tmp_path):
    return Pipeline(tmp_path / "pipeline", run)


def test_pretraining_through_the_profile(pipeline):
    """The job is what the site expects: a budget, whole nodes, 4 devices, its time limit."""
    pipeline.completes(pipeline.start(f"{pipeline.folder}/results/runs/mae_tiny/done"), 400)
    assert pipeline.read("runs/mae_tiny/run.json")["world_size"] == 4
    job = pipeline.read("runs/mae_tiny/job.json")["id"]
    shown = dict(
        word.split("=", 1)
        for word in pipeline.slurm.run("scontrol", "show", "job", job).split()
        if "=" in word
    )
    wanted = {"Partition": "booster", "Account": ACCOUNT, "NumNodes": "1", "NumTasks": "4",
              "CPUs/Task": "12", "TimeLimit": "1-00:00:00", "OverSubscribe": "NO",
              "TresPerNode": "gres:gpu:4"}  # fmt: skip
    assert {key: shown[key] for key in wanted} == wanted
    wait_for(lambda: not pipeline.live())


@pytest.mark.slow
def test_whole_experiment_through_the_profile(pipeline):
    """Every stage and kind of evaluation; Snakemake is killed once on the way."""
    first = pipeline.start("evaluations")
    run = pipeline.folder / "results/runs/mae_tiny"
    wait_for(lambda: progress(run, read_job(run)), 300)
    first.kill()
    first.wait(30)
    pipeline.completes(pipeline.start("evaluations"), 1500)
    for name in ("mae_tiny", "ct_tiny"):
        assert pipeline.read(f"runs/{name}/run.json")["world_size"] == 4
        assert pipeline.read(f"evaluations/{name}/knn.json")["metrics"]["knn"] > 10
        assert not pipeline.read(f"runs/{name}/job.json")["earlier"]
    wait_for(lambda: not pipeline.live())
