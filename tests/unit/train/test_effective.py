"""What of the device time that a training holds counts as useful."""

from types import SimpleNamespace

from ranks import Place

from maect.train import step
from maect.train.step import DeviceTime


def test_the_time_of_attempts_before_is_that_of_the_log(monkeypatch):
    clock = SimpleNamespace(now=50.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(step, "time", clock)
    place = Place(0, 0, 2)
    place.began = 40.0
    logged = {"device_seconds": 300.0, "held_seconds": 400.0, "useful_seconds": 280.0}
    timing = DeviceTime(place, 200.0, logged)
    clock.now += 5.0
    assert timing.timing == {
        "device_seconds": 310.0, "held_seconds": 430.0, "useful_seconds": 200.0,
    }  # fmt: skip


def test_what_counts_as_useful(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(step, "time", clock)
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
