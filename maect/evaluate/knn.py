"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
deviation (`knn_standardized`, what the authors' logger does).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.evaluate.job import Context, Job, idle_cpus
from maect.evaluate.neighbors import nearest
from maect.evaluate.protocols import Knn
from maect.evaluate.store import Features

INPUTS = ("train", "test")
TEST_DATA = "knn_best and knn_standardized_best choose k and T on the test split; knn does not"
ROWS = 16384
QUERIES = 256

Array = NDArray[np.float32]


def evaluate(context: Context, job: Job, settings: Knn) -> dict[str, Any]:
    """Metrics in percent: `knn`, `knn_standardized`, and the whole sweep over k and T.

    `knn_best` and `knn_standardized_best` choose k and T on the test split, as the paper does for
    other methods' checkpoints that report no k-NN accuracy.

    Raises:
        UserError: fewer training samples than k.
    """
    train, test = job.both()
    if settings.k > train.n:
        raise UserError(f"knn: k {settings.k} is more than the {train.n} samples of {train.path}")
    counts = sorted({settings.k, *(k for k in settings.sweep if k <= train.n)})
    temperatures = sorted({settings.temperature, *settings.temperatures})
    metrics: dict[str, Any] = {}
    sweep = []
    for name, standardized in (("knn", False), ("knn_standardized", True)):
        scale = moments(train) if standardized else None
        similarity, ids = nearest(train, test.all(), max(counts), scale, idle_cpus(context))
        for k in counts:
            for temperature in temperatures:
                votes = vote(similarity[:, :k], train.labels[ids[:, :k]], temperature)
                accuracy = 100 * int(np.sum(votes == test.labels)) / test.n
                sweep.append(
                    {
                        "k": k,
                        "temperature": temperature,
                        "standardized": standardized,
                        "accuracy": accuracy,
                    }
                )
                if (k, temperature) == (settings.k, settings.temperature):
                    metrics[name] = accuracy
        chosen = [row for row in sweep if row["standardized"] == standardized]
        metrics[f"{name}_best"] = max(row["accuracy"] for row in chosen)
    return {**metrics, "sweep": sweep}


def moments(train: Features) -> tuple[Array, Array]:
    """Mean and deviation of each feature over the train set, 1 where it does not vary.

    Biased variance, as scikit-learn's StandardScaler; summed in float64 in chunks.
    """
    total = np.zeros(train.width)
    starts = range(0, train.n, ROWS)
    for start in starts:
        total += train.rows(start, min(start + ROWS, train.n)).sum(axis=0, dtype=np.float64)
    mean = total / train.n
    total[:] = 0
    for start in starts:
        total += np.square(train.rows(start, min(start + ROWS, train.n)) - mean).sum(axis=0)
    deviation = np.sqrt(total / train.n)
    # Rounding leaves a trace of a deviation on a feature that is the same everywhere.
    constant = deviation <= 1e-6 * np.abs(mean)
    return mean.astype(np.float32), np.where(constant, 1, deviation).astype(np.float32)


def vote(
    similarity: NDArray[np.float64], labels: NDArray[np.int64], temperature: float
) -> NDArray[np.int64]:
    """Class of the largest summed weight exp(s / T); of equal classes the first.

    Args:
        similarity: [q, k], most similar first.
        labels: int64 [q, k].
        temperature: T.

    Returns:
        int64 [q].
    """
    # Relative to the nearest: the same vote, and no overflow at small T.
    weights = np.exp((similarity - similarity[:, :1]) / temperature)
    classes = int(labels.max()) + 1
    out = np.empty(len(labels), np.int64)
    for start in range(0, len(labels), QUERIES):
        part = slice(start, start + QUERIES)
        rows = np.arange(len(labels[part]))[:, None] * classes
        votes = np.bincount(
            (rows + labels[part]).ravel(), weights[part].ravel(), minlength=len(rows) * classes
        )
        out[part] = votes.reshape(-1, classes).argmax(axis=1)
    return out
