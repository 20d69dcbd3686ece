"""Real training on the test cluster: a fault changes no bit of the encoder or of its log."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import ROOT, finish, kill, wait_for
from slurm_cluster import ACCOUNT
from slurm_run import SlurmRun

from maect.launch.record import saved_step
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

    def pids(self) -> dict[int, int]:
        place = self.folder / "jobs" / self.read("job.json")["name"]
        return {
            int(file.stem.split("-")[1]): json.loads(file.read_text())["pid"]
            for file in place.glob("rank-*.json")
        }

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


def test_killed_launcher(training, reference):
    launcher = training.start()
    training.trains(10)
    training.kill(launcher)
    words = training.wait(training.start())
    assert len(training.jobs()) == 1 and "re-attached to slurm job" in words
    training.is_the_same_as(reference, "kill -9 of a launcher", "the job went on; was found")


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
    psutil.Process(training.pids()[1]).kill()
    words = finish(launcher, 400)
    assert len(training.jobs()) == 2 and "submitting it again" in words
    training.is_the_same_as(reference, "kill -9 of one rank", "submitted again from its last state")


def test_all_ranks_killed(training, reference):
    launcher = training.start()
    training.trains(10)
    kill([psutil.Process(pid) for pid in training.pids().values()])
    training.wait(launcher)
    assert len(training.jobs()) == 2
    training.is_the_same_as(
        reference, "kill -9 of all ranks", "submitted again from its last state"
    )


def test_cancelled_by_a_person(training, reference):
    launcher = training.start()
    training.trains(10)
    training.slurm.run("scancel", *training.jobs())
    words = finish(launcher)
    assert launcher.returncode == 2 and "was cancelled by a person" in words
    assert len(training.jobs()) == 1 and not training.live()
    training.wait(training.start())
    training.is_the_same_as(
        reference, "scancel by the user", "saved, stopped, said so; the next start went on"
    )


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


def test_lost_node_that_is_needed_comes_back(training, reference):
    training.slurm.run("scontrol", "update", "NodeName=jwb0003", "State=DRAIN", "Reason=test")
    try:
        launcher = training.start()
        training.trains(10)
        training.slurm.kill_node("jwb0002")
        wait_for(lambda: "PENDING" in training.jobs().values(), 120, pause=0.5)
        time.sleep(5)
        assert launcher.poll() is None
        training.slurm.start_node("jwb0002")
        training.wait(launcher)
    finally:
        training.slurm.run("scontrol", "update", "NodeName=jwb0003", "State=RESUME")
    training.is_the_same_as(
        reference, "power loss of a node that is needed, and its return", "waited, then went on"
    )


def test_requeued_by_the_administrator(training, reference):
    launcher = training.start()
    training.trains(10)
    (job,) = training.jobs()
    training.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: training.jobs()[job] == "PENDING", pause=0.2)
    training.wait(launcher, 400)
    assert len(training.jobs()) == 1
    training.is_the_same_as(reference, "scontrol requeue", "same job id, from its last state")


def test_preempted_by_a_higher_partition(training, reference):
    launcher = training.start()
    training.trains(10)
    (job,) = training.jobs()
    urgent = ["sbatch", "-p", "urgent", "-A", ACCOUNT, "-N", "3", "-o", "/dev/null"]
    training.slurm.run(*urgent, "--wrap", "sleep 3")
    wait_for(lambda: training.jobs()[job] == "PENDING", pause=0.2)
    training.wait(launcher)
    assert len(training.jobs()) == 1
    training.is_the_same_as(
        reference, "preemption by a higher partition", "SLURM queued the job again; waited"
    )


def test_controller_away(training, reference):
    launcher = training.start()
    training.trains(10)
    training.slurm.stop_daemon("slurmctld")
    try:
        psutil.Process(training.pids()[1]).kill()
        time.sleep(120)
        assert launcher.poll() is None
    finally:
        training.slurm.start_daemon("slurmctld")
    training.wait(launcher)
    training.is_the_same_as(
        reference, "slurmctld away for two minutes, a rank killed meanwhile",
        "no verdict until it answered; from its last state",
    )  # fmt: skip


def test_accounting_away(training, reference):
    training.slurm.stop_daemon("slurmdbd")
    try:
        launcher = training.start()
        training.trains(10)
        psutil.Process(training.pids()[1]).kill()
        training.wait(launcher)
    finally:
        training.slurm.start_daemon("slurmdbd")
    assert len(training.jobs()) == 2
    training.is_the_same_as(
        reference, "slurmdbd away for the whole run, a rank killed meanwhile",
        "squeue alone; submitted again",
    )  # fmt: skip


def test_full_disk(training, reference):
    with training.small_disk("100m"):
        launcher = training.start()
        training.trains(10)
        filler = training.fill_disk()
        words = finish(launcher)
        assert launcher.returncode == 2 and "No space left on device" in words
        wait_for(lambda: not training.live())
        filler.unlink()
        training.wait(training.start())
        training.is_the_same_as(
            reference, "full disk", "stopped, naming the full disk; went on once there was space"
        )


def test_nodes_whose_clocks_are_off(training, reference):
    nodes = {"jwb0001": 3600, "jwb0002": -3600}
    for node, seconds in nodes.items():
        training.slurm.set_clock(node, seconds)
    try:
        launcher = training.start()
        training.trains(10)
        psutil.Process(training.pids()[1]).kill()
        training.wait(launcher)
    finally:
        for node in nodes:
            training.slurm.set_clock(node, 0)
    training.is_the_same_as(
        reference, "two nodes an hour off, a rank killed", "no time of another machine is believed"
    )


def test_three_wall_limits(training, reference):
    launcher = training.start()
    wait_for(training.jobs, what="for the job")
    (job,) = training.jobs()
    for step in (8, 20, 32):
        training.trains(step)
        training.slurm.run("scancel", "--signal=USR2", job)  # as SLURM does before the limit
        wait_for(lambda: training.jobs()[job] == "PENDING", 120, pause=0.2)
        assert training.returned() == "requeue"
        assert saved_step(training.folder, training.job()) >= step
        training.before = training.progress()
        training.release()
    training.wait(launcher, 400)
    assert len(training.jobs()) == 1 and training.repeated() == 0
    training.is_the_same_as(reference, "three wall limits", "saved together, queued itself again")
