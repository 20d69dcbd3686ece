"""Corrections without training, against a second writing in float64."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score

from maect.core.errors import UserError
from maect.evaluate import clustering
from maect.evaluate.base import EvaluationJob
from maect.evaluate.geometry import corrections, mean_and_covariance
from maect.evaluate.low_shot import choose_samples
from maect.evaluate.protocols.stored_features import Clustering, Geometry, Knn, LowShot
from maect.evaluate.store import open_features

from .by_hand import clear, scikit_knn
from .conftest import features_job, given, store

WIDTH, CLASSES = 10, 4
NAMES = [
    "raw", "centred", "standardized", "whitened_0", "whitened_0.01", "whitened_0.1",
    "without_1", "without_2", "without_4",
]  # fmt: skip
REMOVED = (1, 2, 4)  # of nine directions that vary: what is left has no equal similarities


def hidden_classes(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes far apart in three directions of little variance, below six of much; all rotated."""
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(5)
    labels = rng.permutation(np.arange(n) % CLASSES)
    corners = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    rows = rng.normal(size=(n, WIDTH)) * [30, 20, 15, 10, 8, 5, 0, 0.04, 0.04, 0.04]
    rows[:, 7:] += corners[labels]
    rotation = np.linalg.qr(fixed.normal(size=(WIDTH, WIDTH)))[0]
    return (rows @ rotation + 50 * fixed.normal(size=WIDTH)).astype(np.float32), labels


@pytest.fixture
def digits(tmp_path: Path) -> EvaluationJob:
    return features_job(tmp_path, hidden_classes(240, 0), hidden_classes(80, 1))


def by_hand(train: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray:
    """A correction by the singular values of the training rows, in float64."""
    x, y = train.astype(np.float64), rows.astype(np.float64)
    kind, _, number = name.partition("_")
    if kind == "raw":
        return y
    y = y - x.mean(0)
    x = x - x.mean(0)
    _, singular, right = np.linalg.svd(x, full_matrices=False)
    if kind == "standardized":
        return y / np.sqrt((x * x).mean(0))
    if kind == "whitened":
        variance, s = singular**2 / len(x), float(number)
        variance = (1 - s) * variance + s * variance.sum() / WIDTH
        kept = variance > 1e-9 * variance.max()  # one direction does not vary
        return (y @ right[kept].T / np.sqrt(variance[kept])) @ right[kept]
    if kind == "without":
        for direction in right[: int(number)]:
            y = y - np.outer(y @ direction, direction)
    return y


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows * rows).sum(1, keepdims=True))


def test_corrections_agree(digits):
    train, test = open_features(digits.path("train")), open_features(digits.path("test"))
    made = corrections(train.values, removed=REMOVED)
    assert list(made) == NAMES
    for name in NAMES:
        expected = by_hand(train.values, test.values, name)
        got = made[name](test.values)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert np.array_equal(made["raw"](test.values), test.values)


def test_every_measure_agrees(digits, rank):
    """k-NN and few labels exactly; clusters where whitening sets the classes far apart."""
    train, test = open_features(digits.path("train")), open_features(digits.path("test"))
    metrics = Geometry(runs=2, removed=REMOVED).evaluate(rank, digits)
    assert set(digits.outcomes) >= {f"{m}_{n}" for m in ("knn", "accuracy") for n in NAMES}
    knn = Knn().evaluate(rank, digits)
    for end in ("_low", "_high"):
        assert metrics[f"knn_raw{end}"] == knn[f"knn{end}"]
        assert metrics[f"knn_standardized{end}"] == knn[f"knn_standardized{end}"]
    for name in NAMES:
        x, y = (by_hand(train.values, part.values, name) for part in (train, test))
        clear(unit(y) @ unit(x).T, 1e-7, chosen=10)
        right = scikit_knn(x, train.labels, y, 10, 0.07, least=1e-6) == test.labels
        assert metrics[f"knn_{name}"] == pytest.approx(100 * right.mean(), abs=1e-9), name
        for shots in (1, 2, 5):
            found = []
            for split in (1, 2, 3):
                ids = choose_samples(train, shots, split, LowShot())
                assert np.bincount(train.labels[ids]).tolist() == [shots] * CLASSES
                centred = [unit(part - part.mean(1, keepdims=True)) for part in (x[ids], y)]
                model = LogisticRegression(
                    C=1 / 0.00025, fit_intercept=False, tol=1e-9, max_iter=5000
                ).fit(centred[0], train.labels[ids])
                clear(model.predict_proba(centred[1]), 2e-5)
                found.append(100 * (model.predict(centred[1]) == test.labels).mean())
            assert metrics[f"low_shot_{shots}_{name}"] == pytest.approx(np.mean(found)), name
    assert metrics["nmi_whitened_0"] == metrics["accuracy_whitened_0"] == pytest.approx(100)
    for name in ("raw", "standardized"):
        clusters = KMeans(CLASSES, n_init=10, random_state=0).fit_predict(
            unit(by_hand(train.values, test.values, name))
        )
        nmi = 100 * normalized_mutual_info_score(test.labels, clusters)
        assert nmi < 60 and metrics[f"nmi_{name}"] < 60
    assert metrics["knn_raw"] < 70 and metrics["knn_whitened_0"] == 100
    rows = clustering.unit(test.values)
    each = [clustering.one_run(rows, test.labels, seed, Clustering())[1]["nmi"] for seed in (0, 1)]
    assert metrics["nmi_raw_std"] == pytest.approx(np.std(each, ddof=1)) and each[0] != each[1]


def test_test_images_fit_nothing():
    """The corrections are those of the training images, whatever is tested with them."""
    rows, _ = hidden_classes(60, 0)
    made = corrections(rows)
    assert list(made)[-1] == "without_8" and "without_10" not in corrections(rows, (), (10,))
    other, _ = hidden_classes(20, 9)
    for name, correct in made.items():
        whole = correct(np.concatenate([other, 1000 + other]))
        assert np.allclose(whole[:20], correct(other)), name


def test_parts_do_not_matter(monkeypatch):
    rows, _ = hidden_classes(240, 0)
    whole = mean_and_covariance(rows)
    monkeypatch.setattr("maect.evaluate.store._CHUNK", 7)
    parts = mean_and_covariance(rows)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(whole[1], np.cov(rows.astype(np.float64), rowvar=False, bias=True))


def test_what_cannot_be_measured(digits, rank, tmp_path):
    rows, labels = hidden_classes(40, 3)
    for split, values, match in (
        ("train", (rows[:8], labels[:8]), "geometry: k 10 is more than the 8 of .*a.safetensors"),
        ("test", (rows, 0 * labels), "a.safetensors: geometry needs at least two classes"),
        ("test", (0 * rows + 1, labels), "a.safetensors: fewer distinct features than 4 classes"),
    ):
        other = given(digits, **{split: store(tmp_path / "a.safetensors", *values)})
        with pytest.raises(UserError, match=match):
            Geometry(runs=1).evaluate(rank, other)
