from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

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


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Two real principal components of a third of the digits, and their labels."""
    images, labels = load_digits(return_X_y=True)
    points = PCA(2, svd_solver="full").fit_transform(images)
    return points[::3].astype(np.float32), labels[::3].astype(np.int64)


@pytest.fixture(scope="session")
def write_embedding(digits: tuple[np.ndarray, np.ndarray]) -> Writer:
    """Writes a run's `umap.safetensors` into a folder of evaluations."""

    def write(folder: Path, run: str) -> Path:
        path = folder / run / "umap.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"points": digits[0], "labels": digits[1]}, path)
        return path

    return write


@pytest.fixture
def embedding(write_embedding: Writer, evaluations: Path) -> Writer:
    return partial(write_embedding, evaluations)
