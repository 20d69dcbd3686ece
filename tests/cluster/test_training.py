"""Real training on the test cluster: a fault changes no bit of the encoder or of its log."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launching import ROOT, kill, wait_for
from slurm_run import SlurmRun

from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.stages.run import RunConfig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TRAIN = ("--save-every-minutes", "0.03")


def maect(*words: object) -> None:
    """Run a `maect` command to its end."""
    command = [sys.executable, "-m", "maect", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


class Training(SlurmRun):
    """`maect train` on two nodes, one rank each."""

    def command(self, arguments: dict, resources: dict, *words: str) -> list[str]:
        given = {**resources, "nodes": 2, "devices": 1}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        python = [sys.executable, "-m", "maect", "train", str(self.folder / "config.yaml")]
        return [*python, *TRAIN, *options, *words]

    def trains(self, step: int) -> None:
        """Wait for a step, and for some steps after a state."""
        wait_for(lambda: self.step() >= step, 300, f"for step {step}", pause=0.2)
        wait_for(self.saved, 60, "for a state")
        wait_for(lambda: self.step() > max(self.saved()) + 5, 60, "for steps to repeat")

    def saved(self) -> list[int]:
        """Steps of the states on disk."""
        return [int(file.parent.name[5:]) for file in self.folder.glob("state/step-*/state.json")]


def logged(folder: Path) -> list[dict]:
    """Logged values without those that depend on the clock."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


def test_killed_snakemake_and_launcher_and_then_a_node(run, tmp_path):
    """The job goes on and is found; the power loss of one of its nodes repeats some steps."""
    maect("retrieve", "digits", tmp_path / "images")
    maect("shard", tmp_path / "images/train", tmp_path / "shards")
    training, undisturbed = Training(run.folder, run.slurm), tmp_path / "undisturbed"
    training.launchers = run.launchers  # ended with those of `run`
    for folder in (undisturbed, training.folder):
        RunConfig(
            run=folder.name, stage="pretrain", size="tiny", shards=tmp_path / "shards",
            encoder=load_encoder("tiny"), settings=load_recipe("mae", "tiny", {"epochs": 24}),
        ).write(folder / "config.yaml")  # fmt: skip
    maect("train", undisturbed / "config.yaml", *TRAIN, "--devices", 2, "--cpus", 1)  # here
    first = training.pipeline(tmp_path)
    training.trains(10)
    launcher = psutil.Process(training.read("owner.lock")["pid"])
    first.kill()
    kill([launcher])
    first.wait(30)
    second = training.pipeline(tmp_path)
    log = tmp_path / "log"
    wait_for(lambda: "re-attached to slurm job" in log.read_text(), 60)
    assert len(training.jobs()) == 1
    training.slurm.kill_node("jwb0002")
    wait_for(lambda: training.jobs() != dict.fromkeys(training.jobs(), "RUNNING"), 90, pause=0.5)
    training.wait(second)
    assert second.returncode == 0
    weights = [*undisturbed.glob("*.safetensors")]
    assert weights
    for file in weights:
        assert (training.folder / file.name).read_bytes() == file.read_bytes()
    assert logged(training.folder) == logged(undisturbed)
    training.settled()
