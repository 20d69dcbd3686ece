"""Real training on the test cluster: a fault changes no bit of the encoder or of its log."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launching import ROOT, finish, kill, wait_for
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
    before: dict

    @staticmethod
    def recipe(folder: Path, shards: Path) -> list[str]:
        RunConfig(
            run=folder.name, stage="pretrain", size="tiny", shards=shards,
            encoder=load_encoder("tiny"), settings=load_recipe("mae", "tiny", {"epochs": 24}),
        ).write(folder / "config.yaml")  # fmt: skip
        return ["train", str(folder / "config.yaml"), "--save-every-minutes", "0.03"]

    def command(self, arguments: dict, resources: dict, *words: str) -> list[str]:
        given = {**resources, "nodes": 2, "devices": 1, "cpus": 1}
        options = [f"--{key}={value}" for key, value in given.items()]
        python = [sys.executable, "-m", "maect"]
        return [*python, *self.recipe(self.folder, self.shards), *options, *words]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for process in self.processes():
            is_rank = "submitit.core._submit" in process.cmdline()
            if is_rank and process.environ().get("SLURM_PROCID") == str(number):
                return process
        raise AssertionError(f"no rank {number}")

    def trains(self, step: int) -> None:
        """Wait for a step, and for some steps after a state; note how far it is."""
        wait_for(lambda: self.step() >= step, 300, f"for step {step}", pause=0.2)
        wait_for(self.saved, 60, "for a state")
        wait_for(lambda: self.step() > max(self.saved()) + 5, 60, "for steps to repeat")
        self.before = self.progress()

    def saved(self) -> list[int]:
        """Steps of the states on disk."""
        return [int(file.parent.name[5:]) for file in self.folder.glob("state/step-*/state.json")]

    def repeated(self) -> float:
        after = self.progress()
        if after["first_step"] == self.before["first_step"]:
            return 0.0  # it was not started again
        pace = after["seconds"] / (after["step"] - after["first_step"])
        return max(0, self.before["step"] - (after["first_step"] - 1)) * pace

    def is_the_same_as(self, reference: Path, fault: str, seen: str) -> None:
        for name in ("encoder.safetensors", "decoder.safetensors"):
            if (reference / name).exists():
                assert (self.folder / name).read_bytes() == (reference / name).read_bytes()
        assert logged(self.folder) == logged(reference)
        self.settled()
        self.table.note(f"real training: {fault}", seen, len(self.jobs()), self.repeated())


def logged(folder: Path) -> list[dict]:
    """Logged values without those that depend on the clock."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


@pytest.fixture
def training(run: SlurmRun, shards: Path) -> Training:
    training = Training(run.folder, run.slurm, run.table)
    training.launchers = run.launchers  # ended with those of `run`
    training.shards = shards
    return training


def test_killed_snakemake_and_launcher(training, reference, tmp_path):
    first = training.pipeline(tmp_path)
    training.trains(10)
    launcher = psutil.Process(training.read("owner.lock")["pid"])
    first.kill()
    kill([launcher])
    first.wait(30)
    assert training.pipeline(tmp_path).wait(400) == 0
    assert (
        len(training.jobs()) == 1 and "re-attached to slurm job" in (tmp_path / "log").read_text()
    )
    training.is_the_same_as(
        reference, "kill -9 of Snakemake and its launcher", "the job went on; was found"
    )


def test_killed_rank(training, reference):
    launcher = training.start()
    training.trains(10)
    training.rank(1).kill()
    words = finish(launcher, 400)
    assert len(training.jobs()) == 2 and "submitting it again" in words
    training.is_the_same_as(reference, "kill -9 of one rank", "submitted again from its last state")


def test_interrupted(training, reference):
    launcher = training.start()
    training.trains(10)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "saved and stopped" in words
    wait_for(lambda: not training.live())
    training.wait(training.start())
    assert len(training.jobs()) == 2 and training.repeated() < 1
    training.is_the_same_as(reference, "Ctrl-C", "saved and stopped; the next start went on")


def test_node_loses_power(training, reference):
    launcher = training.start()
    training.trains(10)
    training.slurm.kill_node("jwb0002")
    wait_for(lambda: training.jobs() != dict.fromkeys(training.jobs(), "RUNNING"), 90, pause=0.5)
    training.wait(launcher, 400)
    training.is_the_same_as(reference, "power loss of one of two nodes", "went on elsewhere")
