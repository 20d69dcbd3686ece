"""Logistic regression on few labels: some samples per class, or a fraction of them (paper, B).

The setting of DINO and MSN: frozen features, rows centred and scaled to length 1, an L2 penalty,
no intercept:

    minimise over W  (1/n) sum_i -log softmax(x_i W)[y_i] + (penalty / 2) |W|^2

A strictly convex problem: every solver has the same answer, to its tolerance.
"""

import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.subsets import Labelled, fraction_rows_of, shots_rows
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.protocols.stored_features import LowShot
from maect.evaluate.real import real_labels_of
from maect.evaluate.store import Array, FeatureFile
from maect.recipes.few_labels import fraction_name

GAP = 1e-9  # relative duality gap
MEMORY = 10
MAX_ITERATIONS = 5000


class _ConvergedError(Exception):
    """The duality gap is small enough."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        super().__init__()
        self.weights = weights


def evaluate(settings: LowShot, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Accuracies in percent: `low_shot_N`, the mean over splits, and each; `low_shot_Npct`.

    docs/reference/few_labels.md lists the metrics.
    """
    settings.check_lists()
    train, test = job.train_and_test()
    wanted = [(shots, split) for shots in settings.shots for split in range(1, settings.splits + 1)]
    subsets: dict[Any, NDArray[np.int64]] = {p: choose_samples(train, *p, settings) for p in wanted}
    for fraction in settings.fractions:
        subsets[fraction] = fraction_rows_of(
            as_split(train), fraction, settings.seed, settings.subsets
        )
    if any(len(np.unique(train.labels[ids])) < 2 for ids in subsets.values()):
        raise UserError(
            f"{train.path}: low_shot needs at least two classes, and the samples it would "
            "train on are of one; extract features of a split with more"
        )
    queries = center_and_scale(test.values)
    job.notes["subsets"] = {
        _subset_name(name): {"images": len(ids)} for name, ids in subsets.items()
    }
    real = real_labels_of(settings, test.names, test.record["class_names"], test.labels)

    def accuracy(name: Any) -> tuple[NDArray[np.bool_], bool, float]:
        ids = subsets[name]
        given = train.values[ids], train.labels[ids], train.classes
        found, converged = classify(*given, queries, settings.l2)
        by_real = real.accuracy(found) if real else 0.0
        return found == test.labels, converged, by_real

    with (
        threadpool_limits(1, user_api="blas"),
        warnings.catch_warnings(),
        ThreadPoolExecutor(idle_cpus(context)) as pool,
    ):
        warnings.simplefilter("ignore")  # a solver that gives up is in the JSON
        results = dict(zip(subsets, pool.map(accuracy, subsets), strict=True))
    metrics: dict[str, Any] = {}
    correct: dict[str, NDArray[Any]] = {}
    for shots in settings.shots:
        scored = [results[shots, split] for split in range(1, settings.splits + 1)]
        right, converged, by_real = map(list, zip(*scored, strict=True))
        correct[f"low_shot_{shots}"] = np.stack(right)
        accuracies = [100 * int(np.sum(one)) / test.n for one in right]
        metrics[f"low_shot_{shots}"] = float(np.mean(accuracies))
        metrics[f"low_shot_{shots}_splits"] = accuracies
        metrics[f"low_shot_{shots}_converged"] = converged
        if real:
            metrics[f"low_shot_{shots}_real"] = float(np.mean(by_real))
    for fraction in settings.fractions:
        name = fraction_name(fraction)
        correct[name], metrics[f"{name}_converged"], found = results[fraction]
        metrics[name] = 100 * int(np.sum(correct[name])) / test.n
        if real:
            metrics[f"{name}_real"] = found
    return metrics | job.keep_outcomes(correct)


def _subset_name(name: Any) -> str:
    """Return a subset's name in a result: `low_shot_5-2`, or that of the fraction's metric."""
    return f"low_shot_{name[0]}-{name[1]}" if isinstance(name, tuple) else fraction_name(name)


def choose_samples(
    train: FeatureFile, shots: int, split: int, settings: LowShot
) -> NDArray[np.int64]:
    """Return the ids of one split's training samples, sorted: from a list, or drawn by seed.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.
    """
    return shots_rows(as_split(train), shots, split, settings.seed, settings.subsets)


def as_split(train: FeatureFile) -> Labelled:
    """Return a features file as a split to choose samples from."""
    return Labelled(train.path, train.labels, train.names, train.record["class_names"])


def center_and_scale(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Centre each row [n, d] on its own mean and scale it to length 1 (MSN, MAE-CT); 0 stays 0.

    float64: weak penalties such as these need it.
    """
    rows = features.astype(np.float64)
    centred = rows - rows.mean(axis=1, keepdims=True)
    length = np.sqrt(np.square(centred).sum(axis=1, keepdims=True))
    # What rounding leaves of a constant row is not a direction.
    residue = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    centred = np.where(length > residue, centred / np.maximum(length, 1e-300), 0.0)
    return centred


def classify(
    known: Array, labels: NDArray[np.int64], classes: int, queries: NDArray[np.float64], l2: float
) -> tuple[NDArray[np.int64], bool]:
    """Return the class of each query, int64 [q], and whether the solver reached its tolerance.

    Args:
        known: features of the labelled samples, as they are, float32 [n, d].
        labels: of these, int64 [n].
        queries: prepared by `center_and_scale`, [q, d].
        l2: weight of the penalty, which is divided by n.
    """
    weights, converged = fit(center_and_scale(known), labels, classes, l2 / len(labels))
    return predict(queries, weights), converged


def right_by_few_labels(
    known: Iterable[tuple[Array, NDArray[np.int64]]],
    classes: int,
    queries: NDArray[np.float64],
    truth: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return whether each query is classified rightly by each set of labels, bool [sets, q].

    Args:
        known: features and labels of each set, as `classify` takes them; made under one thread.
        classes: number of classes.
        queries: prepared by `center_and_scale`, [q, d].
        truth: class of each query, int64 [q].
    """
    l2 = LowShot().l2
    # A solver that gives up is as low as rounding lets it be.
    with threadpool_limits(1, user_api="blas"), warnings.catch_warnings(action="ignore"):
        return np.stack([classify(*one, classes, queries, l2)[0] == truth for one in known])


def fit(
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    classes: int,
    penalty: float,
) -> tuple[NDArray[np.float64], bool]:
    """Solve the problem above, to a relative duality gap of 1e-9.

    Args:
        features: [n, d], prepared.
        labels: [n], of at least two classes; classes that do not occur are never predicted.

    Returns:
        W, float64 [d, classes] with NaN in the columns of classes that do not occur, and whether
        the solver reached its tolerance.
    """
    present, dense = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        raise UserError("logistic regression needs samples of at least two classes")
    weights, converged = _lbfgs(features, dense, len(present), penalty)
    out = np.full((features.shape[1], classes), np.nan)
    out[:, present] = weights
    return out, converged


def predict(features: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Predict the most probable class of each row, int64 [n]; ties: the first."""
    present = np.flatnonzero(~np.isnan(weights[0]))
    return present[(features @ weights[:, present]).argmax(axis=1)]


def _lbfgs(
    features: NDArray[np.float64], labels: NDArray[np.int64], classes: int, penalty: float
) -> tuple[NDArray[np.float64], bool]:
    """scipy's L-BFGS, until the duality gap |gradient|^2 / (2 penalty) is small.

    By hand it took 0.5 to 0.8 times as long, since the search along a direction needs no product
    of matrices: 1.0 for 1.3 s at 1,000 samples and classes.
    """
    n = len(features)
    shape = (features.shape[1], classes)

    def value(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(shape)
        loss, residual = _loss(features @ weights, labels)
        loss += penalty / 2 * float(np.vdot(flat, flat))
        gradient = (features.T @ residual / n + penalty * weights).ravel()
        if np.vdot(gradient, gradient) <= 2 * penalty * GAP * loss:
            raise _ConvergedError(weights.copy())
        return loss, gradient

    options = {"maxcor": MEMORY, "maxiter": MAX_ITERATIONS, "maxfun": 2 * MAX_ITERATIONS}
    start = np.zeros(np.prod(shape))
    never = {"ftol": 0.0, "gtol": 0.0}
    try:
        result = minimize(value, start, jac=True, method="L-BFGS-B", options=options | never)
    except _ConvergedError as converged:
        return converged.weights, True
    return result.x.reshape(shape), False  # as low as rounding lets it be


def _loss(
    logits: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[float, NDArray[np.float64]]:
    """Compute the mean cross-entropy, and softmax minus one-hot labels, [n, classes]."""
    at = (np.arange(len(logits)), labels)
    largest = logits.max(axis=1, keepdims=True)
    residual = np.exp(logits - largest)
    total = residual.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) + largest[:, 0] - logits[at]))
    residual /= total
    residual[at] -= 1
    return loss, residual
