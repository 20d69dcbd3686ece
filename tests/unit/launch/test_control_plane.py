"""Histories of a simulated control plane: some thousands here, a million in the slow test."""

from collections.abc import Callable

import control_plane
import pytest
from control_plane import BrokenError, Fault, check, draw, fails, many, shrink

from maect.launch import slurm
from maect.launch.state import Notice


def report(broken: list[tuple[int, str]]) -> str:
    """A failing history, small enough to become a test."""
    seed, why = broken[0]
    return f"{len(broken)} histories fail; seed {seed}: {why}\n{shrink(draw(seed))}"


@pytest.mark.parametrize("first", [0, 500, 1000, 1500])
def test_histories(first: int) -> None:
    broken = many(first, 500)
    assert not broken, report(broken)


@pytest.mark.slow
def test_a_hundred_thousand_histories() -> None:
    """`python tests/unit/launch/control_plane.py 1000000` takes hours and all cores."""
    broken = many(10_000, 100_000)
    assert not broken, report(broken)


def test_a_history_is_a_function_of_its_seed() -> None:
    assert draw(7) == draw(7) != draw(8)
    first, second = check(draw(7)), check(draw(7))
    assert first.log == second.log and first.now == second.now


def believe_the_lists(self: slurm.Slurm, job: object) -> Notice:
    return Notice("ended", "unknown to SLURM", grace=30.0)


def believe_any_word(self: slurm.Slurm, job_id: str, word: str, reason: str, now: float) -> Notice:
    return Notice("running" if word in ("PENDING", "RUNNING") else "ended", word, grace=1.0)


@pytest.mark.parametrize(
    "method, mistake",
    [
        ("_ask_controller", believe_the_lists),
        ("_word", believe_any_word),
    ],
)
def test_a_launcher_that_is_wrong_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: str, mistake: Callable[..., Notice]
) -> None:
    """Each of these mistakes was once in the launcher; a few faults show it."""
    monkeypatch.setattr(slurm.Slurm, method, mistake)
    seed = next(seed for seed in range(3000) if fails(draw(seed)))
    assert 1 <= len(shrink(draw(seed))) <= 3


@pytest.mark.parametrize(
    "faults",
    [
        # A shell that listed other jobs, and no accounting: the job lives, and is not cancelled.
        [Fault(0, "squeue lists nothing", 3279), Fault(190, "sacct silent", 672)],
        [Fault(0, "squeue lists others only", 4000), Fault(0, "sacct away", 4000)],
        [Fault(0, "unknown word", 78)],
        [Fault(0, "next submission: accepted late"), Fault(0, "queue is full", 2000)],
        [Fault(300, "node is taken for dead"), Fault(400, "launcher killed")],
        [Fault(500, "node is taken for dead"), Fault(510, "launcher killed")],
        [Fault(1, "ids begin again"), Fault(100, "rank dies"), Fault(101, "ids begin again")],
    ],
    ids=str,
)
def test_histories_that_once_failed(faults: list[Fault]) -> None:
    check(faults)


def test_what_must_hold_is_looked_at() -> None:
    world = control_plane.World([])
    for name in ("first", "second"):
        job = world.accept(name)
        world.write("run/job.json", f'{{"name": "{name}", "state": "submitted"}}', "login")
        if name == "second":
            with pytest.raises(BrokenError, match="begins beside"):
                world.pass_time(30)
        else:
            world.pass_time(30)
            assert job.training is not None and job.training.alive
