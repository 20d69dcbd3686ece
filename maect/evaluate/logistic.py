"""Logistic regression on all labels, its penalty chosen on a part held out from training.

Features are standardised with the training images' mean and standard deviation. scikit-learn's
L-BFGS, in float64, fits weights and intercepts for each C; the C of the highest accuracy on the
held-out tenth (of equal ones the smallest) is fitted again to all training images. CAPI chooses
among the same eight C, DINOv3 among 45 in the same range, both on a tenth of the training images.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.evaluate.base import Count, EvaluationJob, Input, Positive, ReadsFeatures, idle_cpus
from maect.evaluate.real import RealLabels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array

PENALTIES: tuple[float, ...] = tuple(round(10 ** (-6 + 11 * i / 7), 12) for i in range(8))
"""10 to the powers from -6 to 5, in seven equal steps (CAPI)."""


class Logistic(RealLabels, ReadsFeatures):
    """Logistic regression on all labels, its penalty chosen on held-out training images."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression on all labels"
    minutes: ClassVar[float] = 60.0

    penalties: tuple[Positive, ...] = Field(default=PENALTIES, min_length=1)
    """C: weight of the summed loss beside half the squared weights, as scikit-learn writes it."""
    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose C on."""
    max_iterations: Count = 1000

    def inputs(self) -> dict[str, Input]:
        """Features of both splits."""
        return {"train": self.read(self.train_split), "test": self.read(self.test_split)}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Metrics: `logistic` with the ends of its 95 % interval, and what was chosen;
        with `real_labels` also `logistic_real`.

        Raises:
            UserError: training images of one class only, or no class with two, or labels of other
                images.
        """
        import numpy as np
        from threadpoolctl import threadpool_limits

        from maect.evaluate.sampling import ends, held_out

        train, test = job.both()
        held = held_out(train.labels, train.names(), self.one_in)
        if len(np.unique(train.labels)) < 2 or not held.any():
            raise UserError(f"{train.path}: logistic needs two classes and two images of a class")
        given, threads = (train.all(), train.labels), idle_cpus(context)
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a weak penalty may not converge, nor need to
            identity = digest(self, train.record["encoder_sha256"], train.record["index_digest"])
            tried = job.once(context, identity, partial(self._tried, *given, held, threads))
            chosen = max(tried, key=itemgetter("accuracy"))["c"]  # of equal ones the smallest
            classes = fitted(*given, chosen, self.max_iterations).predict(test.all())
        correct = classes == test.labels
        return {
            "logistic": float((100.0 * correct).mean()),
            **ends({"logistic": correct}),
            "c": chosen,
            **self.real("logistic", classes, test.names, test.record["class_names"]),
            "held_out": tried,
        }

    def _tried(
        self, features: Array, labels: NDArray[np.int64], held: NDArray[np.bool_], threads: int
    ) -> list[dict[str, float]]:
        """Return each C with its accuracy on held-out training images, in order."""
        _, found = choose(features, labels, held, self.penalties, self.max_iterations, threads)
        return [{"c": c, "accuracy": accuracy} for c, accuracy in found.items()]


class Fitted:
    """A fitted regression with the standardisation that belongs to it."""

    def __init__(self, model: Any, scale: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
        self._model, self._scale = model, scale

    def predict(self, features: Array) -> NDArray[np.int64]:
        """Return the most probable class of each row, int64 [n]."""
        from maect.evaluate.store import standardize

        classes: NDArray[np.int64] = self._model.predict(
            standardize(features, self._scale).astype("float64")
        )
        return classes


def fitted(
    features: Array, labels: NDArray[np.int64], c: float, max_iterations: int = 1000
) -> Fitted:
    """Fit weights and intercepts.

    Args:
        features: float32 [n, d].
        labels: int64 [n], of two classes at least.
        c: see `Logistic.penalties`.
        max_iterations: of L-BFGS.
    """
    from sklearn.linear_model import LogisticRegression

    from maect.evaluate.store import InMemory, moments, standardize

    scale = moments(InMemory(features).rows, *features.shape)
    model = LogisticRegression(C=c, max_iter=max_iterations)
    model.fit(standardize(features, scale).astype("float64"), labels)
    return Fitted(model, scale)


def choose(
    features: Array,
    labels: NDArray[np.int64],
    held: NDArray[np.bool_],
    penalties: Sequence[float] = PENALTIES,
    max_iterations: int = 1000,
    threads: int = 1,
) -> tuple[float, dict[float, float]]:
    """Choose C by the accuracy on held-out training images, of equal ones the smallest.

    Call it with one thread of BLAS: on a busy machine two take ten times as long together.

    Args:
        features: of all training images, float32 [n, d].
        labels: int64 [n].
        held: which are held out, bool [n].
        penalties: C to choose from.
        max_iterations: of L-BFGS.
        threads: how many C are fitted at once.

    Returns:
        The chosen C, and the accuracy of each in percent.
    """

    def accuracy(c: float) -> float:
        model = fitted(features[~held], labels[~held], c, max_iterations)
        return 100 * float((model.predict(features[held]) == labels[held]).mean())

    with ThreadPoolExecutor(threads) as pool:
        tried = dict(zip(sorted(penalties), pool.map(accuracy, sorted(penalties)), strict=True))
    return max(tried, key=lambda c: (tried[c], -c)), tried
