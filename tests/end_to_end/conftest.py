"""The small pipeline, undisturbed; and no process of a test outlives it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "launch"))

from mini_pipeline import MINI, Pipeline


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """A pipeline of a test that failed would slow down all that follow."""
    yield
    Pipeline(tmp_path, {}).kill_everything()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The mini pipeline, run to its end without a disturbance."""
    pipeline = Pipeline(tmp_path_factory.mktemp("undisturbed"), MINI)
    pipeline.complete("evaluations")
    return pipeline
