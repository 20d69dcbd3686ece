"""What of the device time that a training holds counts as useful."""

from types import SimpleNamespace

from ranks import Place

from maect.train import device_time
from maect.train.device_time import DeviceTime


def test_what_counts_as_useful(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(device_time, "time", clock)
    steps = DeviceTime(Place(0, 0, 1), {"useful_seconds": 100.0})
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
