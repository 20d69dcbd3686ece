"""A rank that is missing from a collective is named, and nobody who is only slow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run
from test_resume import identical

from maect.core.context import Context
from maect.train import watchdog
from maect.train.watchdog import (
    COMPUTING,
    READING,
    SAVING,
    UPDATING,
    StalledError,
    Watchdog,
)


def test_a_frozen_rank_is_named_and_the_run_goes_on_from_its_state(job, tmp_path, whole):
    log = tmp_path / "log"
    stalled = job("stalled", "mae") | {"save_every_minutes": 0.0}
    said = run(2, stalled, log=log, freeze_at=4, stall_seconds=4)
    assert said.startswith("StalledError: rank 1 (")
    assert "no sign of life" in said
    assert re.search(
        "it, (updating the weights in step 4|(computing|saving the state before) step 5)", said
    )
    assert "most recent call first" in log.read_text()  # where this rank stood
    assert run(2, stalled, log=log) == ["done"]
    identical(whole / "mae", stalled["folder"])
    assert not (Path(stalled["folder"]) / "heartbeats").exists()


LAUNCH = """
import json, sys
from pathlib import Path
from maect.core.log import command_log
from maect.launch import Resources, Task, launch
job = json.loads(sys.argv[1])
folder = Path(job["folder"])
with command_log():
    launch(Task("ranks:train", job), folder, Resources("local", devices=2, cpus=1),
           is_done=(folder / "run.json").exists, describe="stalled")
"""


@pytest.mark.slow
def test_the_launcher_says_who_is_missing_and_starts_the_job_again(job, tmp_path):
    whole = job("whole", "mae", epochs=40)
    assert run(2, whole, log=tmp_path / "log") == ["done"]
    stalled = job("stalled", "mae", epochs=40) | {"save_every_minutes": 0.0}
    folder = Path(stalled["folder"])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, json.dumps(stalled)], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"MAECT_STALL_SECONDS": "20", "DS_ACCELERATOR": "cpu",
                          "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    try:
        while len(list(folder.glob("state/*/state.json"))) < 2:
            assert launcher.poll() is None
            time.sleep(0.01)
        (place,) = folder.glob("jobs/*/rank-1.json")
        os.kill(json.loads(place.read_text())["pid"], signal.SIGSTOP)
        _, words = launcher.communicate(timeout=400)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, words
    assert "(rank 1 (" in words and "no sign of life" in words and "submitting it again" in words
    identical(whole["folder"], stalled["folder"])


class Rank(Context):
    """A context whose `fail` only notes what it is told."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.world_size, self.said = rank, 2, []

    def fail(self, error):
        assert isinstance(error, StalledError)
        self.said.append(str(error))


class Clock:
    """In place of the module `time`: it stands still until a test lets it go on."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(Watchdog, "_watch", lambda dog: dog._closed.wait())
    monkeypatch.setenv("MAECT_STALL_SECONDS", "300")
    return clock


@pytest.fixture
def pair(tmp_path, clock):
    """Two ranks that have done one step, and what each says: `ticks` are the seconds between."""
    ranks = [Rank(0), Rank(1)]
    dogs = [Watchdog(tmp_path, rank) for rank in ranks]

    def said(first, second, ticks=(30,) * 30, first_step=False, other=None):
        for dog, place in zip(dogs, (first, second), strict=True):
            for step in () if first_step else (1, 2):
                dog.begin(READING, step)
            dog.begin(place, 2)
        if other == "done":
            dogs[1].close()
        for seconds in ticks:
            clock.now += seconds
            dogs[0].tick()
            if other is None:
                dogs[1].tick()
        return [rank.said for rank in ranks]

    yield said
    for dog in dogs:
        dog.close()


def test_the_rank_that_is_behind_is_named(pair):
    first, second = pair(COMPUTING, READING, ticks=(30,) * 10)
    assert len(first) == 1 and first[0].startswith("rank 1 (")
    assert "has been reading the batch of step 2 for 270 s" in first[0]
    assert "this rank has waited 300 s for it, computing step 2" in first[0]
    assert not second


def test_nobody_is_named_before_the_limit(pair):
    assert pair(COMPUTING, READING, ticks=(30,) * 9) == [[], []]


@pytest.mark.parametrize("other", [SAVING])
def test_a_long_save_or_evaluation_is_no_stall(pair, other):
    assert pair(UPDATING, other) == [[], []]


def test_a_rank_that_falls_silent_is_named_by_one_that_saves(pair):
    first, _ = pair(SAVING, COMPUTING, other="silent")
    assert first[0].startswith("rank 1 (") and "no sign of life" in first[0]


def test_a_rank_that_is_done_is_not_missed_by_one_that_saves(pair):
    assert pair(SAVING, SAVING, other="done") == [[], []]


def test_the_first_step_may_take_long(pair):
    assert pair(COMPUTING, READING, first_step=True) == [[], []]


def test_nobody_is_accused_when_all_are_in_the_same_place(pair):
    first, second = pair(COMPUTING, COMPUTING)
    assert all("all ranks have been computing step 2" in words[0] for words in (first, second))


def test_processes_that_were_suspended_begin_to_count_again(pair):
    assert pair(COMPUTING, READING, ticks=(30, 3600, *(30,) * 9)) == [[], []]
