"""What of the device time that a training holds counts as useful."""

from types import SimpleNamespace

import pytest
from ranks import Place

from maect.train import step
from maect.train.step import DeviceTime


@pytest.fixture
def clock(monkeypatch):
    """The time of the steps, in seconds."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(step, "time", clock)
    return clock


def test_the_time_of_attempts_before_is_that_of_the_log(clock):
    clock.now = 50.0
    place = Place(0, 0, 2)
    place.began = 40.0
    logged = {"device_seconds": 300.0, "held_seconds": 400.0, "useful_seconds": 280.0}
    timing = DeviceTime(place, 200.0, logged)
    clock.now += 5.0
    assert timing.timing == {
        "device_seconds": 310.0, "held_seconds": 430.0, "useful_seconds": 200.0,
    }  # fmt: skip


def test_what_counts_as_useful(clock):
    steps = DeviceTime(Place(0, 0, 1), 100.0)
    for seconds in (60.0, 2.0, 3.0):  # the first compiles
        clock.now += seconds
        assert steps.step() == seconds
    assert steps.useful == 107.0
    with steps.outside_steps(useful=False):
        clock.now += 4.0
    with steps.outside_steps(useful=True):
        clock.now += 1.0
    clock.now += 2.0
    assert (steps.step(), steps.useful) == (2.0, 110.0)


def test_the_speed_is_that_of_the_last_eight_steps(clock):
    place = Place(0, 0, 2)
    place.began = 0.0
    steps = DeviceTime(place, 0.0)
    for seconds in (10.0, *[0.5] * 8):
        clock.now += seconds
        assert steps.step() == seconds
    assert steps.steps_per_second == 2.0
    # On two ranks; the second step counts for the first, too.
    assert steps.timing == {"device_seconds": 28.0, "held_seconds": 28.0, "useful_seconds": 9.0}
    assert steps.step() > 0 and steps.steps_per_second > 0  # between two ticks of the clock


def test_the_share_of_online_evaluations_is_of_the_time_of_the_attempt(clock):
    steps = DeviceTime(Place(0, 0, 1), 0.0)
    assert steps.online_part == 0.0
    with steps.outside_steps(useful=True, online=True):
        clock.now += 2.0
    with steps.outside_steps(useful=True):
        clock.now += 6.0
    assert steps.online_part == 0.25
