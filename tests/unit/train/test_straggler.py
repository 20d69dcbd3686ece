"""A rank that makes all others wait, step after step, is named; a short trouble is not."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from ranks import run, train
from tiny_runs import metrics

from maect.data import loader
from maect.train import watchdog
from maect.train.straggler import Pace, Stragglers


def compare(*rates: list[tuple[float, float]]) -> list[str]:
    """Ranks and what they wait for, as seconds a step of every rank change from tick to tick."""
    stragglers, totals, said = Stragglers(60.0), [(0, 0.0, 0.0)] * len(rates[0]), []
    for number, window in enumerate(rates):
        totals = [
            (steps + 10, data + 10 * more, device + 10 * longer)
            for (steps, data, device), (more, longer) in zip(totals, window, strict=True)
        ]
        paces = {rank: Pace(*total) for rank, total in enumerate(totals)}
        said += [
            f"{slow.rank} {slow.at} {number}" for slow in stragglers.compare(20.0 * number, paces)
        ]
    return said


EVEN = [(0.1, 0.5)] * 4
DATA = [(0.1, 0.5)] * 3 + [(0.9, 0.5)]
DEVICE = [(0.1, 0.9)] + [(0.1, 0.5)] * 3
NODE = [(0.1, 0.5)] * 2 + [(0.9, 0.5), (1.2, 0.5)]


@pytest.mark.parametrize(
    "windows, said",
    [
        ([EVEN] * 9, []),
        ([EVEN] + [DATA] * 9, ["3 data 3"]),
        ([DEVICE] * 9, ["0 device 3"]),
        ([NODE] * 9, ["2 data 3", "3 data 3"]),
        ([EVEN, DATA, DATA, EVEN, DATA, DATA, EVEN], []),
        # Much slower than almost nothing is nothing.
        ([[(1e-5, 0.5)] * 3 + [(1e-2, 0.5)]] * 9, []),
    ],
)
def test_what_lasts_is_found_once(windows, said):
    assert compare(*windows) == said


def test_ticks_between_two_long_steps_change_nothing():
    stragglers, paces = Stragglers(60.0), {0: Pace(1, 0.1), 1: Pace(1, 50.0)}
    assert not stragglers.compare(0.0, paces)
    assert not [stragglers.compare(float(now), paces) for now in range(1, 99)][-1]
    assert not stragglers.compare(99.0, paces | {0: Pace(2, 0.2)})
    (slow,) = stragglers.compare(100.0, {0: Pace(2, 0.2), 1: Pace(2, 100.0)})
    assert (slow.rank, slow.at, round(slow.seconds)) == (1, "data", 50)


def train_with_a_slow_loader(context, **job):
    """Rank 1 waits minutes for each of its batches, by the clock of its watchdog.

    Rank 0 waits in its steps for the next tick, until one of them finds somebody.
    """
    if context.rank == 1:
        late, wait = [0.0], loader._wait

        def waiting(*arguments):
            late[0] += 1000.0
            return wait(*arguments)

        loader._wait = waiting
        watchdog.time = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0])
    ticks, seen = [], []

    class Counted(Stragglers):
        def compare(self, now, paces):
            found = super().compare(now, paces)
            ticks.append(now)
            return found

    def report(progress):
        seen.append(progress["slow"])
        before = len(ticks)
        while context.rank == 0 and not progress["slow"] and len(ticks) == before:
            time.sleep(0.01)

    watchdog.Stragglers, watchdog.SLOW_TICKS = Counted, 1
    context.report = report
    verdict = train(context, **job)
    return json.dumps([verdict, sorted({slow for slow in seen if slow})])


def test_a_real_rank_whose_loader_is_slow(job, tmp_path):
    whole, slow = job("whole", "mae", epochs=20), job("slow", "mae", epochs=20)
    log = tmp_path / "log"
    assert run(2, whole, log=log) == ["done"]
    log.write_text("")
    slow |= {"function": train_with_a_slow_loader}
    (said,) = run(2, slow, log=log, stall_seconds=10.0)
    verdict, reports = json.loads(said)
    pattern = (
        r"rank 1 \(\S+, process \d+\) makes all others wait: \S+ s a step for its batch, "
        r"others \S+ s; it waits for data"
    )
    assert verdict == "done" and len(re.findall(pattern, "\n".join(reports))) == 1
    assert len(re.findall(pattern, log.read_text())) == 1
    assert metrics(whole["folder"]) == metrics(slow["folder"])
