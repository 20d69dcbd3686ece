"""The longest files first, some together on one worker, and a limit on every teardown."""

import faulthandler
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from fault_audit import FaultAudit
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

FIRST = (  # what takes longest on one worker leads
    "tests/unit/train",
    "tests/cluster",
    "tests/end_to_end",
    "tests/unit/launch/test_launch_local.py",
    "tests/unit/launch/test_slurm_states.py",
    "tests/unit/test_extending.py",
    "tests/unit/answers/test_notebooks.py",
)
TOGETHER = {
    "the test cluster": ("tests/cluster/",),
    "trainings compared with the same three": (
        "tests/unit/train/test_damage.py",
        "tests/unit/train/test_divergence.py",
        "tests/unit/train/test_run_lock.py",
        "tests/unit/train/test_resume.py",
        "tests/unit/train/test_stages.py",
        "tests/unit/train/test_watchdog.py",
        "tests/unit/train/test_world_size.py",
    ),
    "other trainings, forked from one process": ("tests/unit/train/",),
    "small results and evaluations, forked from one process": (
        "tests/faults/",
        "tests/unit/evaluate/test_fine_tune_ranks.py",
        "tests/unit/evaluate/test_two_ranks.py",
    ),
    "UMAP, which Numba compiles at its first use": (
        "tests/unit/answers/test_notebooks.py",
        "tests/unit/evaluate/test_explore.py",
    ),
}
# Files whose tests have nothing in common and take long: any worker takes the next one of them.
APART = (
    "tests/faults/test_doors.py",
    "tests/unit/launch/test_launch_local.py",
    "tests/unit/test_extending.py",
)
TEARDOWN_SECONDS = 240
# The workers share the cores: more threads would only make the tests slower.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests that ask for more have them wait asleep: busy, they take ten times the work from others.
os.environ["OMP_WAIT_POLICY"] = "passive"
TERMINAL = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--audit", type=Path, help="write a table of all trials to this CSV file")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # a quarter of the time of collecting; on again when that is done
    if page := config.getoption("--audit"):
        audit = FaultAudit(page)
        if hasattr(config, "workerinput"):  # the page is the controller's
            audit.pytest_sessionfinish = lambda: None  # type: ignore[method-assign]
        config.pluginmanager.register(audit)
    config.stash[TERMINAL] = os.dup(2)  # later, 2 is a file that holds a test's output
    # Where CI is set, pytest shows a whole difference: with two encoders that takes it hours.
    if os.environ.pop("CI", None):
        os.environ["MAECT_CI"] = "true"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ([not item.nodeid.startswith(first) for first in FIRST], item.path))
    for item in (item for item in items if item.nodeid.startswith(APART)):
        found = (defs[-1] for defs in item._fixtureinfo.name2fixturedefs.values())  # type: ignore[attr-defined]
        shared = [each.argname for each in found if each.baseid and each.scope != "function"]
        assert not shared, f"{item.nodeid}: {shared} would be made by each worker"


def pytest_collection_finish() -> None:
    # What is imported is no garbage, and each full search would go through all of it.
    gc.collect()
    gc.freeze()
    gc.enable()


class Together(LoadFileScheduling):
    """A worker takes a file at a time, all of a group that shares what is made once, or a test."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        # Not by marks: xdist's groups do not reach the scheduler with pytest 9.
        file = super()._split_scope(nodeid)
        return next((group for group in TOGETHER if file.startswith(TOGETHER[group])), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """pytest-timeout and faulthandler_timeout are both switched off by a test that fails."""
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
