"""A step that does not end ends the job, which goes on from its state; a slow one does not."""

import re
from queue import SimpleQueue

import pytest
from ranks import run
from test_resume import steps_saved

from maect.core.context import Context
from maect.train import watchdog
from maect.train.watchdog import COMPUTING, READING, SAVING, UPDATING, StalledError, Watchdog


def test_a_frozen_rank_ends_the_job(job, tmp_path):
    log = tmp_path / "log"
    stalled = job("stalled", "mae") | {"save_every_minutes": 0.0}
    said = run(2, stalled, log=log, freeze_at=4, stall_seconds=2)
    assert re.match(
        r"StalledError: rank 0 \(.* has been (updating the weights in step 4|computing step 5) for "
        r"\d+ s: another rank is missing",
        said,
    )
    assert "most recent call first" in log.read_text()  # where this rank stood
    assert steps_saved(stalled["folder"])[-1] >= 2


class Rank(Context):
    """A context whose `fail` only notes what it is told."""

    def __init__(self):
        super().__init__()
        self.rank, self.world_size, self.said = 1, 2, []

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
def watched(monkeypatch):
    """A watchdog, the rank that it ends, and its clock."""
    clock, rank = Clock(), Rank()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(Watchdog, "_watch", lambda dog: dog._closed.wait())
    monkeypatch.setenv("MAECT_STALL_SECONDS", "300")
    dog = Watchdog(rank)
    yield dog, rank, clock
    dog.close()


@pytest.mark.parametrize(
    ("activity", "ticks", "steps", "seconds"),
    [
        (READING, (30,) * 9, 2, None),
        (READING, (30,) * 10, 2, 300),
        (COMPUTING, (30,) * 19, 2, None),
        (COMPUTING, (30,) * 20, 2, 600),
        (UPDATING, (30,) * 20, 2, 600),
        (READING, (30, 3600, *(30,) * 9), 2, None),  # suspended, it begins to count again
        (COMPUTING, (30,) * 100, 1, None),  # the first step may take long
        (SAVING, (30,) * 100, 2, None),
    ],
)
def test_deadlines(activity, ticks, steps, seconds, watched):
    dog, rank, clock = watched
    for step in range(1, steps + 1):
        dog.begin(READING, step)
    dog.begin(activity, steps)
    for passed in ticks:
        clock.now += passed
        dog.tick()
    assert len(rank.said) == (seconds is not None)
    if seconds is not None:
        assert rank.said[0].startswith("rank 1 (")
        assert f"has been {activity} step {steps} for {seconds} s" in rank.said[0]


def test_a_rank_without_others_is_watched(monkeypatch):
    said = SimpleQueue()
    rank = Rank()
    rank.world_size, rank.fail = 1, said.put
    monkeypatch.setenv("MAECT_STALL_SECONDS", "0.01")
    dog = Watchdog(rank)
    for step in (1, 2):
        dog.begin(READING, step)
    dog.begin(COMPUTING, 2)
    fault = said.get(timeout=60)
    dog.close()
    assert re.search(r"has been computing step 2 for \d+ s: a device hangs$", str(fault))


def test_a_long_step_makes_the_limit_longer(watched):
    """But not what took long between two steps."""
    dog, rank, clock = watched
    said = []
    clock.now += 900
    dog.begin(READING, 1)
    dog.begin(SAVING, 1)
    clock.now += 900
    dog.begin(READING, 1)
    for number in range(18):
        if number == 3:  # after 90 s
            dog.begin(READING, 2)
        clock.now += 30
        dog.tick()
        said.append(len(rank.said))
    assert said == [0] * 17 + [1]  # 450 s, five times the longest step
