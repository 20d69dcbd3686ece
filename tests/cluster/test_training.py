"""Real training on the test cluster: a fault changes no bit of the encoder or of its log."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launching import ROOT, finish, wait_for
from slurm_run import SlurmRun

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
    """`maect pretrain` on two nodes, one rank each."""

    shards: Path
    before: dict

    @staticmethod
    def recipe(folder: Path, shards: Path) -> list[str]:
        words = ["pretrain", folder, "--shards", shards, "--recipe", "mae", "--size", "tiny"]
        return [*map(str, words), "--set", "epochs=8", "--save-every-minutes", "0.03"]

    def command(self, arguments: dict, resources: dict, *words: str) -> list[str]:
        given = {**resources, "nodes": 2, "devices": 1, "cpus": 1}
        options = [f"--{key}={value}" for key, value in given.items()]
        python = [sys.executable, "-m", "maect"]
        return [*python, *self.recipe(self.folder, self.shards), *options, *words]

    def pids(self) -> dict[int, int]:
        place = self.folder / "jobs" / self.read("job.json")["name"]
        return {
            int(file.stem.split("-")[1]): json.loads(file.read_text())["pid"]
            for file in place.glob("rank-*.json")
        }

    def trains(self, step: int) -> None:
        """Wait for a step, and for a state to go on from; note how far it is."""
        wait_for(lambda: self.step() >= step, 300, f"for step {step}", pause=0.2)
        wait_for(lambda: list(self.folder.glob("state/*/state.json")), 60, "for a state")
        self.before = self.read("progress.json")

    def repeated(self) -> float:
        after = self.read("progress.json")
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


def test_killed_rank(training, reference):
    launcher = training.start()
    training.trains(10)
    psutil.Process(training.pids()[1]).kill()
    words = finish(launcher, 400)
    assert len(training.jobs()) == 2 and "submitting it again" in words
    training.is_the_same_as(reference, "kill -9 of one rank", "submitted again from its last state")


def test_node_loses_power(training, reference):
    launcher = training.start()
    training.trains(10)
    training.slurm.kill_node("jwb0002")
    wait_for(lambda: training.jobs() != dict.fromkeys(training.jobs(), "RUNNING"), 90, pause=0.5)
    training.wait(launcher, 400)
    training.is_the_same_as(reference, "power loss of one of two nodes", "went on elsewhere")


def test_requeued_by_the_administrator(training, reference):
    launcher = training.start()
    training.trains(10)
    (job,) = training.jobs()
    training.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: training.jobs()[job] == "PENDING", pause=0.2)
    training.wait(launcher, 400)
    assert len(training.jobs()) == 1
    training.is_the_same_as(reference, "scontrol requeue", "same job id, from its last state")


def test_two_wall_limits(training, reference):
    launcher = training.start()
    wait_for(training.jobs, what="for the job")
    (job,) = training.jobs()
    for step in (8, 20):
        training.trains(step)
        training.slurm.run("scancel", "--signal=USR2", job)  # as SLURM does before the limit
        wait_for(lambda: training.jobs()[job] == "PENDING", 120, pause=0.2)
        saved = training.read("verdict.json")
        assert saved["verdict"] == "requeue" and saved["step"] >= step
        training.before = training.read("progress.json")
        training.release()
    training.wait(launcher, 400)
    assert len(training.jobs()) == 1 and training.repeated() == 0
    training.is_the_same_as(reference, "two wall limits", "saved together, queued itself again")
