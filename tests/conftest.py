"""The longest files first, the cluster's tests on one worker, and a limit on every teardown."""

import faulthandler
import os
from collections.abc import Generator

import pytest

FIRST = ("tests/end_to_end", "tests/cluster")
TEARDOWN_SECONDS = 240
TERMINAL = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TERMINAL] = os.dup(2)  # later, 2 is a file that holds a test's output
    # Where CI is set, pytest shows a whole difference: with two encoders that takes it hours.
    if os.environ.pop("CI", None):
        os.environ["MAECT_CI"] = "true"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def group(item: pytest.Item) -> str:
        file = item.path.relative_to(config.rootpath).as_posix()
        return "cluster" if file.startswith("tests/cluster/") else file

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """pytest-timeout and faulthandler_timeout are both switched off by a test that fails."""
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
