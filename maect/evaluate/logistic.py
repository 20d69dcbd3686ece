"""Logistic regression on all labels, its penalty chosen on a part held out from training.

Features are standardised with the training images' mean and standard deviation. scikit-learn's
L-BFGS, in float64, fits weights and intercepts for each C; the C of the highest accuracy on the
held-out tenth (of equal ones the smallest) is fitted again to all training images. CAPI chooses
among the same eight C, DINOv3 among 45 in the same range, both on a tenth of the training images.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.outcomes import held_out_by_content
from maect.evaluate.protocols.stored_features import PENALTIES, Logistic
from maect.evaluate.real import real_labels_of
from maect.evaluate.store import Array, Scale, moments, standardize


def evaluate(settings: Logistic, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Return `logistic`, the ends of its 95 % interval, the chosen C and all that were tried.

    With `real_labels` also `logistic_real`.
    """
    train, test = job.train_and_test()
    real = real_labels_of(settings, test.names, test.record["class_names"], test.labels)
    held = held_out_by_content(train.labels, train.contents(), settings.one_in)
    if len(np.unique(train.labels)) < 2 or not held.any():
        raise UserError(f"{train.path}: logistic needs two classes and two images of a class")
    given = (train.values, train.labels)
    threads = idle_cpus(context)
    identity = digest(settings, train.record["sha256"])
    search = partial(
        try_penalties, *given, held, settings.penalties, settings.max_iterations, threads
    )
    # A weak penalty may not converge, nor need to.
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        tried = job.compute_once(context, identity, search)
        chosen = best_penalty(tried)
        classes = fit_logistic(*given, chosen, settings.max_iterations)(test.values)
    correct = classes == test.labels
    return {
        "logistic": float((100.0 * correct).mean()),
        **job.keep_outcomes({"logistic": correct}),
        "c": chosen,
        **({} if real is None else {"logistic_real": real.accuracy(classes)}),
        "held_out": tried,
    }


def fit_logistic(
    features: Array, labels: NDArray[np.int64], c: float, max_iterations: int = 1000
) -> Callable[[Array], NDArray[np.int64]]:
    """Fit weights and intercepts; return a function from rows to their classes, int64 [n].

    Args:
        features: float32 [n, d].
        labels: int64 [n], of two classes at least.
    """
    scale = moments(features)
    model = LogisticRegression(C=c, max_iter=max_iterations)
    model.fit(_standardized(features, scale), labels)
    return lambda rows: model.predict(_standardized(rows, scale))


def _standardized(rows: Array, scale: Scale) -> NDArray[np.float64]:
    return standardize(rows, scale).astype("float64")


def try_penalties(
    features: Array,
    labels: NDArray[np.int64],
    held: NDArray[np.bool_],
    penalties: Sequence[float] = PENALTIES,
    max_iterations: int = 1000,
    threads: int = 1,
) -> list[dict[str, float]]:
    """Return each C with its accuracy on held-out training images in percent, in order.

    Call it with one thread of BLAS: on a busy machine two take ten times as long together.

    Args:
        features: of all training images, float32 [n, d].
        labels: int64 [n].
        held: which are held out, bool [n].
        threads: how many C are fitted at once.
    """

    given = features[~held]
    scale = moments(given)
    known = _standardized(given, scale)
    queries = _standardized(features[held], scale)
    del given  # memory holds one copy for all C, in float64

    def tried(c: float) -> dict[str, float]:
        model = LogisticRegression(C=c, max_iter=max_iterations).fit(known, labels[~held])
        right = model.predict(queries) == labels[held]
        return {"c": c, "accuracy": 100 * float(right.mean())}

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(tried, sorted(penalties)))


def best_penalty(tried: Sequence[dict[str, float]]) -> float:
    """Return the C of the highest accuracy; ties: the smallest."""
    return max(tried, key=itemgetter("accuracy"))["c"]
