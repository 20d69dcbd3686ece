from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from maect.records import EvaluationRecord

Writer = Callable[..., Path]


@pytest.fixture(scope="session")
def write_result() -> Writer:
    """Writes an evaluation's result into a folder of evaluations, as `maect evaluate` does."""

    def write(folder: Path, run: str, protocol: str, **metrics: float) -> Path:
        path = folder / run / f"{protocol}.json"
        about = {"settings": {"seed": 0}, "provenance": {"run": run}}
        EvaluationRecord(metrics=metrics, **about).write(path)
        return path

    return write


@pytest.fixture
def result(write_result: Writer, tmp_path: Path) -> Writer:
    return partial(write_result, tmp_path / "evaluations")


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    (tmp_path / "evaluations").mkdir(exist_ok=True)
    return tmp_path / "evaluations"
