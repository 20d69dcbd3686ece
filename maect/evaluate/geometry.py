"""Stored features corrected without training, then measured: how much of a gain a matrix gives.

A correction is an affine map, fitted on the training images without their labels. k-NN, few labels
and clusters then read directions: rows have length 1 behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.parallel import Parallel, delayed

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.clustering import SCORES, SMALL, is_right, one_run
from maect.evaluate.knn import votes_by_setting
from maect.evaluate.low_shot import center_and_scale, choose_samples, right_by_few_labels
from maect.evaluate.protocols.stored_features import (
    REMOVED,
    SHRINKAGES,
    Clustering,
    Geometry,
    LowShot,
)
from maect.evaluate.store import Array, Correction, Scale, chunks, mean_of, standardize, unit
from maect.recipes import KNN_K, KNN_TEMPERATURE

RAW = "raw"
_LEAST = 1e-10
"""Fraction of the largest variance below which a direction counts as constant."""


def evaluate(settings: Geometry, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Metrics `MEASURE_CORRECTION` in percent, such as `knn_whitened_0.01`.

    docs/reference/geometry.md lists measures and corrections.

    Raises:
        UserError: fewer training images than `k`, or of one class; collapsed features.
    """
    train, test = job.train_and_test()
    if settings.k > train.n:
        raise UserError(f"geometry: k {settings.k} is more than the {train.n} of {train.path}")
    few = LowShot(shots=settings.shots, splits=settings.splits, seed=settings.seed)
    subsets = {
        shots: [choose_samples(train, shots, split, few) for split in range(1, settings.splits + 1)]
        for shots in settings.shots
    }
    task = FeatureTask(
        train.labels, test.labels, subsets, settings.k, settings.temperature, settings.runs
    )
    task.check(test.values, f"{test.path}: ")
    metrics: dict[str, Any] = {}
    right: dict[str, NDArray[np.bool_]] = {}
    for name, correct in corrections(train.values, settings.shrinkages, settings.removed).items():
        measured = task.measure(train.values, test.values, correct, idle_cpus(context))
        right |= {f"{measure}_{name}": one for measure, one in measured.right.items()}
        for score in SCORES:
            values = [scores[score] for scores in measured.clusters]
            metrics[f"{score}_{name}"] = float(np.mean(values))
            metrics[f"{score}_{name}_std"] = float(np.std(values, ddof=min(1, settings.runs - 1)))
    metrics |= {name: 100 * float(one.mean()) for name, one in right.items()}
    return metrics | job.keep_outcomes(right)


@dataclass(frozen=True)
class CorrectedScores:
    """Scores of features after one correction.

    Attributes:
        right: whether each test image was right, bool [trials, n], by measure: `knn` (one trial),
            `low_shot_N` (sets of labels), `accuracy` (runs of k-means).
        clusters: scores of each run of k-means.
    """

    right: dict[str, NDArray[np.bool_]]
    clusters: list[dict[str, float]]


@dataclass(frozen=True)
class FeatureTask:
    """Labels, and settings of the measures: the same for every correction.

    Attributes:
        labels: of the training images, int64 [m].
        test_labels: int64 [n].
        subsets: sets of labelled training images, by their number per class; ids, int64.
        k: of k-NN.
        temperature: of k-NN.
        runs: of k-means, seeds 0 and on.
    """

    labels: NDArray[np.int64]
    test_labels: NDArray[np.int64]
    subsets: Mapping[int, Sequence[NDArray[np.int64]]]
    k: int = KNN_K
    temperature: float = KNN_TEMPERATURE
    runs: int = 10

    def check(self, test: Array, where: str = "") -> None:
        """Raise UserError if features or labels can be neither classified nor clustered."""
        classes = len(np.unique(self.test_labels))
        if classes < 2 or len(np.unique(self.labels)) < 2:
            raise UserError(f"{where}geometry needs at least two classes")
        if len(np.unique(test, axis=0)) < classes:
            raise UserError(
                f"{where}fewer distinct features than {classes} classes; it has collapsed"
            )

    def measure(
        self, train: Array, test: Array, correct: Correction, threads: int = 1
    ) -> CorrectedScores:
        """Measure the corrected features of both splits.

        Args:
            train: as they are, float32 [m, d].
            test: likewise, [n, d].
        """
        queries = correct(test)
        pair = self.k, self.temperature
        votes = votes_by_setting(train, self.labels, test, [pair], correct, threads)[pair]
        right = {"knn": (votes == self.test_labels)[None]}
        prepared = center_and_scale(queries)
        classes = int(self.labels.max()) + 1
        for shots, subsets in self.subsets.items():
            known = ((correct(train[ids]), self.labels[ids]) for ids in subsets)
            found = right_by_few_labels(known, classes, prepared, self.test_labels)
            right[f"low_shot_{shots}"] = found
        right["accuracy"], scores = self._clustered(unit(queries), threads)
        return CorrectedScores(right, scores)

    def _clustered(
        self, rows: Array, threads: int
    ) -> tuple[NDArray[np.bool_], list[dict[str, float]]]:
        """Cluster unit rows: whether each is right, bool [runs, n], and the scores of each run."""
        _, dense = np.unique(self.test_labels, return_inverse=True)
        workers = threads if rows.size * self.runs > SMALL else 1
        asked = (delayed(one_run)(rows, dense, seed, Clustering()) for seed in range(self.runs))
        made = list(Parallel(workers)(asked))
        right = np.stack([is_right(dense, clusters) for _, _, clusters, _ in made])
        return right, [scores for _, scores, _, _ in made]


def corrections(
    train: Array,
    shrinkages: Sequence[float] = SHRINKAGES,
    removed: Sequence[int] = REMOVED,
) -> dict[str, Correction]:
    """Fit every correction on the training features; their labels are not read.

    Returns:
        `raw`, `centred`, `standardized`, `whitened_S` for every shrinkage, `without_N` for every
        number of components below the width.
    """
    mean, covariance = mean_and_covariance(train)
    scale = np.sqrt(np.diagonal(covariance))
    scale = np.where(scale <= 1e-6 * np.abs(mean), np.inf, scale)
    values, vectors = np.linalg.eigh(covariance)
    found: dict[str, Correction] = {
        RAW: _unchanged,
        "centred": _scaled((mean, np.ones_like(mean))),
        "standardized": _scaled((mean, scale)),
    }
    for shrinkage in shrinkages:
        found[f"whitened_{shrinkage:g}"] = _mapped(mean, whitening(values, vectors, shrinkage))
    for number in removed:
        if number < len(mean):
            rest = vectors[:, :-number]
            found[f"without_{number}"] = _mapped(mean, rest @ rest.T)
    return found


def mean_and_covariance(
    features: Array,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean [d] and the (biased) covariance [d, d] of features, in float64."""
    mean = mean_of(features)
    covariance = np.zeros((features.shape[1], features.shape[1]))
    for part in chunks(features):
        rows = part - mean
        covariance += rows.T @ rows
    return mean, covariance / len(features)


def whitening(
    values: NDArray[np.float64], vectors: NDArray[np.float64], shrinkage: float
) -> NDArray[np.float64]:
    """Return the symmetric square root of an inverse covariance, [d, d] (ZCA).

    The covariance C is first shrunk to (1 - s) C + s (trace C / d) I. Directions that do not vary
    become 0 where s is 0.

    Args:
        values: eigenvalues of C, ascending [d].
        vectors: its eigenvectors, in columns [d, d].
        shrinkage: s, 0 to 1.
    """
    shrunk = (1 - shrinkage) * values + shrinkage * values.mean()
    varies = shrunk > _LEAST * shrunk.max(initial=0.0)
    inverse = np.where(varies, 1 / np.sqrt(np.where(varies, shrunk, 1.0)), 0.0)
    return (vectors * inverse) @ vectors.T


def _unchanged(rows: Array) -> Array:
    return rows


def _scaled(scale: Scale) -> Correction:
    return lambda rows: standardize(rows, scale)


def _mapped(mean: NDArray[np.float64], matrix: NDArray[np.float64]) -> Correction:
    return lambda rows: ((rows - mean) @ matrix).astype(np.float32)
