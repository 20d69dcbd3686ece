"""The unmodified `juwels` profile on the look-alike: through Snakemake, with real training."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import ROOT, wait_for
from PIL import Image
from slurm_cluster import ACCOUNT

from maect.launch.record import progress, read_job

pytestmark = pytest.mark.cluster

ONE_EPOCH = {"epochs": 1}
MAE = {"mae_tiny": {"recipe": "mae", "size": "tiny", "set": ONE_EPOCH}}
EXPERIMENT = {
    "datasets": {
        "digits": {"kind": "digits", "resize": 16, "splits": {"train": {"shards": 2}, "val": {}}}
    },
    "runs": MAE
    | {
        "head_tiny": {"recipe": "head_min", "size": "tiny", "from": "mae_tiny", "set": ONE_EPOCH},
        "ct_tiny": {"recipe": "ct_min", "size": "tiny", "from": "head_tiny", "set": ONE_EPOCH},
    },
    "evaluate": [{"runs": ["mae_tiny", "ct_tiny"], "protocols": ["knn", "linear_probe"]}],
    "protocols": {"linear_probe": {"epochs": 1, "warmup_epochs": 0}},
}


class Pipeline:
    """An experiment in a folder of its own, by the profile."""

    def __init__(self, folder: Path, run) -> None:
        self.folder, self.slurm = folder, run.slurm
        folder.mkdir()
        (folder / "envs").symlink_to(ROOT / "envs")

    def write(self, experiment: dict) -> None:
        """Write the experiment."""
        experiment = experiment | {"storage": str(self.folder / "results")}
        (self.folder / "digits.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))

    def start(self, target: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        words += ["--profile", str(ROOT / "cluster_profiles/juwels"), "--directory", "."]
        words += [target, "--config", f"experiment={self.folder / 'digits.yaml'}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                words, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, "MAECT_ACCOUNT": ACCOUNT}, text=True, start_new_session=True,
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


def test_the_job_of_a_pretraining_is_what_the_site_expects(pipeline, tmp_path):
    """A budget, whole nodes, 4 devices, its time limit. Here it pends: nobody has to train."""
    for number in range(8):
        image = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (30 * number, 9, 9)).save(image)
    splits = {"train": {"images": str(tmp_path / "images")}}
    few = {"mae_tiny": MAE["mae_tiny"] | {"set": {"batch_size": 8}}}
    pipeline.write({"datasets": {"mine": {"splits": splits}}, "runs": few})
    partition = ("scontrol", "update", "PartitionName=booster")
    pipeline.slurm.run(*partition, "State=DOWN")
    try:
        snakemake = pipeline.start(f"{pipeline.folder}/results/runs/mae_tiny/done")
        wait_for(lambda: pipeline.live() or snakemake.poll() is not None, 120)
        (job,) = (line.split()[0] for line in pipeline.live())
        text = pipeline.slurm.run("scontrol", "show", "job", job)
        os.killpg(snakemake.pid, signal.SIGINT)
        snakemake.wait(60)
        wait_for(lambda: not pipeline.live(), 60)
    finally:
        pipeline.slurm.run(*partition, "State=UP")
    shown = dict(word.split("=", 1) for word in text.split() if "=" in word)
    wanted = {"Partition": "booster", "Account": ACCOUNT, "NumNodes": "1-1", "NumTasks": "4",
              "CPUs/Task": "12", "TimeLimit": "1-00:00:00", "OverSubscribe": "NO",
              "TresPerNode": "gres:gpu:4"}  # fmt: skip
    assert {key: shown[key] for key in wanted} == wanted


@pytest.mark.slow
def test_whole_experiment_through_the_profile(pipeline):
    """Every stage and kind of evaluation; Snakemake is killed once on the way."""
    pipeline.write(EXPERIMENT)
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
