"""Logistic regression on few labels: some samples per class, or a fraction of them (paper, B).

The setting of DINO and MSN: frozen features, rows centred and scaled to length 1, an L2 penalty,
no intercept:

    minimise over W  (1/n) sum_i -log softmax(x_i W)[y_i] + (penalty / 2) |W|^2

A strictly convex problem: every solver has the same answer, to its tolerance.
"""

from __future__ import annotations

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError, counted
from maect.evaluate.base import Count, EvaluationJob, Fraction, ReadsFeatures, idle_cpus
from maect.evaluate.real import RealLabels
from maect.recipes.few_labels import FewLabels, fraction_list, fraction_name, shots_list

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.data.subsets import Labelled
    from maect.evaluate.store import FeatureFile

GAP = 1e-9  # relative duality gap
MEMORY = 10
MAX_ITERATIONS = 5000


class _ConvergedError(Exception):
    """The duality gap is small enough."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        super().__init__()
        self.weights = weights


class LowShot(FewLabels, RealLabels, ReadsFeatures):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    name: ClassVar[str] = "low_shot"
    title: ClassVar[str] = "logistic regression on few labels"
    minutes: ClassVar[float] = 20.0

    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    fractions: tuple[Fraction, ...] = ()
    """Of the labels, as well: 0.01 and 0.1 in the paper."""
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["lbfgs"] = "lbfgs"
    """In float64. The problem is convex: MSN's and the paper's cyanure has the same optimum."""
    seed: int = 0
    """Seed of the subsets where no lists are given."""

    @model_validator(mode="after")
    def _asked(self) -> LowShot:
        if not self.shots and not self.fractions:
            raise ValueError("neither shots nor fractions: there is nothing to measure")
        return self

    @property
    def lists(self) -> list[Path]:
        """Return the lists of every split and every fraction."""
        if self.subsets is None:
            return []
        shots = itertools.product(self.shots, range(1, self.splits + 1))
        return [
            *(shots_list(self.subsets, *pair) for pair in shots),
            *(fraction_list(self.subsets, each) for each in self.fractions if each < 1),
        ]

    def headline(self) -> dict[str, str]:
        """Accuracies by the number or the fraction of labels."""
        how = "logistic regression"
        shots = {f"low_shot_{n}": f"{counted(n, 'label')} per class, {how}" for n in self.shots}
        return shots | {
            fraction_name(part): f"{100 * part:g} % of the labels, {how}" for part in self.fractions
        }

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: `low_shot_N`, the mean over splits, and each; `low_shot_Npct`.

        docs/reference/few_labels.md lists the metrics.
        """
        import numpy as np

        from maect.data.subsets import fraction_rows_of

        self.check_lists()
        train, test = job.train_and_test()
        wanted = [(shots, split) for shots in self.shots for split in range(1, self.splits + 1)]
        subsets: dict[Any, NDArray[np.int64]] = {p: choose_samples(train, *p, self) for p in wanted}
        for fraction in self.fractions:
            subsets[fraction] = fraction_rows_of(as_split(train), fraction, self.seed, self.subsets)
        if any(len(np.unique(train.labels[ids])) < 2 for ids in subsets.values()):
            raise UserError(
                f"{train.path}: low_shot needs at least two classes, and the samples it would "
                "train on are of one; extract features of a split with more"
            )
        queries = center_and_scale(test.all())
        job.notes["subsets"] = {
            _subset_name(name): {"images": len(ids)} for name, ids in subsets.items()
        }
        real = self.real_labels_of(test.names, test.record["class_names"], test.labels)

        def accuracy(name: Any) -> tuple[NDArray[np.bool_], bool, float]:
            ids = subsets[name]
            given = center_and_scale(train.take(ids)), train.labels[ids], train.classes
            weights, converged = fit(*given, self.l2 / len(ids))
            found = predict(queries, weights)
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
        for shots in self.shots:
            scored = [results[shots, split] for split in range(1, self.splits + 1)]
            right, converged, by_real = map(list, zip(*scored, strict=True))
            correct[f"low_shot_{shots}"] = np.stack(right)
            accuracies = [100 * int(np.sum(one)) / test.n for one in right]
            metrics[f"low_shot_{shots}"] = float(np.mean(accuracies))
            metrics[f"low_shot_{shots}_splits"] = accuracies
            metrics[f"low_shot_{shots}_converged"] = converged
            if real:
                metrics[f"low_shot_{shots}_real"] = float(np.mean(by_real))
        for fraction in self.fractions:
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
    from maect.data.subsets import shots_rows

    return shots_rows(as_split(train), shots, split, settings.seed, settings.subsets)


def as_split(train: FeatureFile) -> Labelled:
    """Return a features file as a split to choose samples from."""
    from maect.data.subsets import Labelled

    return Labelled(train.path, train.labels, train.names, train.record["class_names"])


def center_and_scale(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Centre each row [n, d] on its own mean and scale it to length 1 (MSN, MAE-CT); 0 stays 0.

    float64: weak penalties such as these need it.
    """
    import numpy as np

    rows = features.astype(np.float64)
    centred = rows - rows.mean(axis=1, keepdims=True)
    length = np.sqrt(np.square(centred).sum(axis=1, keepdims=True))
    # What rounding leaves of a constant row is not a direction.
    residue = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    centred = np.where(length > residue, centred / np.maximum(length, 1e-300), 0.0)
    return centred


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
    import numpy as np

    present, dense = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        raise UserError("logistic regression needs samples of at least two classes")
    weights, converged = _lbfgs(features, dense, len(present), penalty)
    out = np.full((features.shape[1], classes), np.nan)
    out[:, present] = weights
    return out, converged


def predict(features: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Predict the most probable class of each row, int64 [n]; ties: the first."""
    import numpy as np

    present = np.flatnonzero(~np.isnan(weights[0]))
    return present[(features @ weights[:, present]).argmax(axis=1)]


def _lbfgs(
    features: NDArray[np.float64], labels: NDArray[np.int64], classes: int, penalty: float
) -> tuple[NDArray[np.float64], bool]:
    """scipy's L-BFGS, until the duality gap |gradient|^2 / (2 penalty) is small.

    By hand it took 0.5 to 0.8 times as long, since the search along a direction needs no product
    of matrices: 1.0 for 1.3 s at 1,000 samples and classes.
    """
    import numpy as np
    from scipy.optimize import minimize

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
    import numpy as np

    at = (np.arange(len(logits)), labels)
    largest = logits.max(axis=1, keepdims=True)
    residual = np.exp(logits - largest)
    total = residual.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) + largest[:, 0] - logits[at]))
    residual /= total
    residual[at] -= 1
    return loss, residual
