from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from maect.records import EvaluationRecord

Writer = Callable[..., Path]


@pytest.fixture
def result(tmp_path: Path) -> Writer:
    """Writes an evaluation's result as `maect evaluate` does."""

    def write(run: str, protocol: str, **metrics: float) -> Path:
        path = tmp_path / "evaluations" / run / f"{protocol}.json"
        about = {"settings": {"seed": 0}, "provenance": {"run": run}}
        EvaluationRecord(metrics=metrics, **about).write(path)
        return path

    return write


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    (tmp_path / "evaluations").mkdir(exist_ok=True)
    return tmp_path / "evaluations"


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Two real principal components of the digits, and their labels."""
    images, labels = load_digits(return_X_y=True)
    points = PCA(2, svd_solver="full").fit_transform(images)
    return points.astype(np.float32), labels.astype(np.int64)


@pytest.fixture
def embedding(evaluations: Path, digits: tuple[np.ndarray, np.ndarray]) -> Callable[[str], Path]:
    """Writes a run's `umap.safetensors`."""

    def write(run: str) -> Path:
        path = evaluations / run / "umap.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"points": digits[0], "labels": digits[1]}, path)
        return path

    return write
