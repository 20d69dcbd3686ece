"""Scores of a frozen encoder on a folder of images, which `maect compare` shows.

k-NN, logistic regression on few and on all labels, RankMe and uniformity. Each measure is the mean
of a score per test image, so that intervals and differences follow from it.

k-NN holds out, votes and chooses by the functions of the protocol `knn` (`maect.evaluate.knn`).
Its images and features may still be others than a report's; docs/reference/compare.md lists every
difference.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect.core.errors import UserError, counted
from maect.data.subsets import balanced_rows
from maect.evaluate.clusters import unit
from maect.evaluate.geometry import RAW, FeatureTask, corrections
from maect.evaluate.knn import sweep_settings
from maect.evaluate.logistic import best_penalty, fit_logistic, try_penalties
from maect.evaluate.low_shot import center_and_scale, right_by_few_labels
from maect.evaluate.outcomes import held_out_by_content, held_out_for
from maect.evaluate.protocols.stored_features import REMOVED, SHRINKAGES, Knn, Logistic
from maect.evaluate.real import Real
from maect.evaluate.store import Array
from maect.measures import rank_me, uniformity
from maect.recipes import KNN_K, KNN_TEMPERATURE

SHOTS = (1, 2, 5, 10)
LABEL_SETS = 5
KNN, KNN_HELD_OUT, KNN_BEST = "knn", "knn_held_out", "knn_best_on_test"
LOGISTIC, RANK_ME, UNIFORMITY = "logistic", "rank_me", "uniformity"
REAL = "_real"
MEASURES = {
    KNN: f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE})",
    KNN_HELD_OUT: "k-NN, k and T chosen on held-out training images",
    KNN_BEST: "k-NN, k and T chosen on the test images",
    **{f"shots_{n}": f"{counted(n, 'label')} per class, logistic regression" for n in SHOTS},
    LOGISTIC: "logistic regression on all labels, C chosen on held-out training images",
    KNN + REAL: f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE}), by ImageNet-ReaL's labels",
    LOGISTIC + REAL: "logistic regression on all labels, by ImageNet-ReaL's labels",
    RANK_ME: "RankMe (effective rank, up to the number of features)",
    UNIFORMITY: "uniformity (0: all alike; more negative: more spread out)",
}
"""Measures, and how tables call them. All but the last two are accuracies in percent."""
CORRECTIONS = {
    RAW: "as they are",
    "centred": "centred",
    "standardized": "standardised",
    **{f"whitened_{s:g}": f"whitened with shrinkage {s:g}" for s in SHRINKAGES},
    **{f"without_{n}": f"without the first {counted(n, 'component')}" for n in REMOVED},
}
"""Corrections of features, and their names in tables."""
GEOMETRY = {
    f"{measure}_{name}": f"{title}, features {text}"
    for measure, title in (
        ("knn", f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE})"),
        ("shots_1", "1 label per class, logistic regression"),
        ("clusters", "k-means, cluster accuracy, mean of 10 runs"),
    )
    for name, text in CORRECTIONS.items()
}
"""Further measures of `--geometry`: accuracies after corrections without training."""
WITHOUT_LABELS = (RANK_ME, UNIFORMITY)
_PAIRS_OF = 2048


@dataclass(frozen=True)
class Score:
    """One measure of one encoder on one folder.

    Attributes:
        per_image: percent of each test image; of several label sets the mean; [n], by ReaL's
            labels of fewer, or [1] without labels.
    """

    per_image: NDArray[np.float64]
    chosen: str = ""
    sets: tuple[float, ...] = field(default=())

    @property
    def value(self) -> float:
        """The measure."""
        return float(self.per_image.mean())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over label sets (n - 1), in percentage points; None without them."""
        return float(np.std(self.sets, ddof=1)) if len(self.sets) > 1 else None


def measure_with_labels(
    train: Array,
    labels: NDArray[np.int64],
    contents: Sequence[int] | Sequence[str],
    test: Array,
    test_labels: NDArray[np.int64],
    threads: int = 1,
    real: Real | None = None,
) -> dict[str, Score]:
    """Measure k-NN and logistic regressions; shots with too few images per class are left out.

    Args:
        contents: checksum of each training image, by which some are held out.
        real: ReaL's labels of the test images, which k-NN and logistic regression are scored by,
            too.

    Raises:
        UserError: fewer training images than k-NN compares with, or one class only.
    """
    if len(labels) < KNN_K:
        raise UserError(f"{len(labels)} training images, too few for k-NN with k {KNN_K}")
    held = held_out_for(labels, contents, len(test))
    held_for_logistic = held_out_by_content(labels, contents, Logistic().one_in)
    if min(len(np.unique(labels[~mask])) for mask in (held, held_for_logistic)) < 2:
        raise UserError("all training images are of one class")
    if not held_for_logistic.any():
        raise UserError("no class has two training images, so none can be held out")
    own = Knn()
    sweep = sweep_settings(own, train, labels, held, test, None, threads)
    outer = {pair: _percent(classes, test_labels) for pair, classes in sweep.votes.items()}
    best = max(outer, key=lambda pair: float(outer[pair].mean()))
    scores = {KNN: Score(outer[own.k, own.temperature])}
    for name, pair in ((KNN_HELD_OUT, sweep.chosen), (KNN_BEST, best)):
        if pair is not None:
            scores[name] = Score(outer[pair], f"k {pair[0]}, T {pair[1]:g}")
    counts = np.bincount(labels)
    queries = center_and_scale(test)
    # A weak penalty may not converge, nor need to.
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        for shots in SHOTS:
            if shots <= counts[counts > 0].min():
                known = [(train[ids], labels[ids]) for ids in _label_sets(labels, shots)]
                right = right_by_few_labels(known, len(counts), queries, test_labels)
                scores[f"shots_{shots}"] = _score_of_sets(right)
        c = best_penalty(try_penalties(train, labels, held_for_logistic, threads=threads))
        classes = fit_logistic(train, labels, c)(test)
    scores[LOGISTIC] = Score(_percent(classes, test_labels), f"C {c:.3g}")
    if real is not None:
        for name, predicted in ((KNN, sweep.votes[own.k, own.temperature]), (LOGISTIC, classes)):
            scores[name + REAL] = Score(100 * real.right(predicted).astype(np.float64))
    return scores


def measure_corrections(
    train: Array,
    labels: NDArray[np.int64],
    test: Array,
    test_labels: NDArray[np.int64],
    threads: int = 1,
) -> dict[str, Score]:
    """Measure `GEOMETRY`; corrections of more components than there are features are left out.

    Raises:
        UserError: features or labels that can be neither classified nor clustered.
    """
    task = FeatureTask(labels, test_labels, {1: _label_sets(labels, 1)})
    task.check(test)
    scores: dict[str, Score] = {}
    for name, correct in corrections(train).items():
        right = task.measure(train, test, correct, threads).right
        scores[f"knn_{name}"] = Score(100.0 * right["knn"][0])
        scores[f"shots_1_{name}"] = _score_of_sets(right["low_shot_1"])
        scores[f"clusters_{name}"] = Score((100.0 * right["accuracy"]).mean(axis=0))
    return scores


def measure_without_labels(features: Array) -> dict[str, Score]:
    """Measure how features [n, d] spread; the first 2,048 are compared for uniformity."""
    some = torch.from_numpy(unit(features[:_PAIRS_OF]))
    return {
        RANK_ME: Score(np.array([rank_me(torch.from_numpy(features))])),
        UNIFORMITY: Score(np.array([uniformity(some)])),
    }


def _percent(classes: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return 100.0 * (classes == labels)


def _label_sets(labels: NDArray[np.int64], shots: int) -> list[NDArray[np.int64]]:
    """Return the ids of `LABEL_SETS` sets with this many training images of each class."""
    present, dense = np.unique(labels, return_inverse=True)
    names = [str(x) for x in present]
    return [balanced_rows(dense, shots, number, names) for number in range(1, LABEL_SETS + 1)]


def _score_of_sets(right: NDArray[np.bool_]) -> Score:
    """Return the score of what is right by each set of labels, bool [sets, n]."""
    percent = 100.0 * right
    return Score(percent.mean(axis=0), sets=tuple(percent.mean(axis=1).tolist()))
