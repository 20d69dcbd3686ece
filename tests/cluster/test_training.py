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


def maect(*words: object) -> None:
    """Run a `maect` command to its end."""
    command = [sys.executable, "-m", "maect", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    maect("retrieve", "digits", folder / "images")
    maect("shard", folder / "images" / "train", folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="session")
def reference(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on two ranks, here and undisturbed."""
    folder = tmp_path_factory.mktemp("reference") / "mae"
    maect(*Training.recipe(folder, shards), "--devices", 2, "--cpus", 1)
    return folder


class Training(SlurmRun):
    """`maect train` on two nodes, one rank each."""

    shards: Path

    @staticmethod
    def recipe(folder: Path, shards: Path) -> list[str]:
        RunConfig(
            run=folder.name, stage="pretrain", size="tiny", shards=shards,
            encoder=load_encoder("tiny"), settings=load_recipe("mae", "tiny", {"epochs": 24}),
        ).write(folder / "config.yaml")  # fmt: skip
        return ["train", str(folder / "config.yaml"), "--save-every-minutes", "0.03"]

    def command(self, arguments: dict, resources: dict, *words: str) -> list[str]:
        given = {**resources, "nodes": 2, "devices": 1}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        python = [sys.executable, "-m", "maect"]
        return [*python, *self.recipe(self.folder, self.shards), *options, *words]

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


@pytest.fixture
def training(run: SlurmRun, shards: Path) -> Training:
    training = Training(run.folder, run.slurm)
    training.launchers = run.launchers  # ended with those of `run`
    training.shards = shards
    return training


def test_killed_snakemake_and_launcher_and_then_a_node(training, reference, tmp_path):
    """The job goes on and is found; the power loss of one of its nodes repeats some steps."""
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

    def is_over() -> bool:
        training.release()
        return second.poll() is not None

    wait_for(is_over, 400, pause=1.0)
    assert second.returncode == 0
    for name in ("encoder.safetensors", "decoder.safetensors"):
        if (reference / name).exists():
            assert (training.folder / name).read_bytes() == (reference / name).read_bytes()
    assert logged(training.folder) == logged(reference)
    training.settled()
