"""Nearest neighbours by cosine similarity, and their vote."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect.evaluate.standardize import Array, Scale, standardize
from maect.evaluate.store import FeatureFile

QUERIES = 1024
TRAIN_ROWS = 16384
_VOTES = 256


def nearest(
    train: FeatureFile, queries: Array, k: int, scale: Scale | None = None, threads: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k most similar training samples of each query, most similar first.

    Products of unit vectors in blocks of one size, each by one thread: the number of threads does
    not change a bit. Of the k, equal similarities are in the order of their ids; which of several
    at the border are among the k is not said. (Cosines in float64 and a search by hand took 0.9 to
    1.1 times as long, and put 0.03 % of the neighbours, equal up to float32's rounding, elsewhere.)
    Memory: a chunk of the train set, the queries, and a block of products for each thread.

    Args:
        train: the train set, read in chunks.
        queries: float32 [q, width].
        k: neighbours, at most train.n.
        scale: mean and standard deviation to standardise both sides with.
        threads: how many blocks of queries are worked on at once.

    Returns:
        Cosine similarities (of a row of zeros: 0), float64 [q, k], and ids, int64 [q, k].
    """
    unit = _unit(queries, scale)
    best = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.zeros((len(queries), k), np.int64)
    blocks = [slice(start, start + QUERIES) for start in range(0, len(queries), QUERIES)]
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        for start in range(0, train.n, TRAIN_ROWS):
            rows = _unit(train.rows(start, min(start + TRAIN_ROWS, train.n)), scale)

            def merge(block: slice, start: int = start, rows: Array = rows) -> None:
                products = unit[block] @ rows.T
                least = max(0, len(rows) - k)
                top = np.argpartition(products, least, axis=1)[:, least:]
                near = np.take_along_axis(products, top, axis=1)
                values = np.concatenate([best[block], near], axis=1)
                names = np.concatenate([ids[block], top + start], axis=1)
                order = np.lexsort((names, -values), axis=1)[:, :k]
                best[block] = np.take_along_axis(values, order, axis=1)
                ids[block] = np.take_along_axis(names, order, axis=1)

            list(pool.map(merge, blocks))
    return best.astype(np.float64), ids


def _unit(features: Array, scale: Scale | None) -> Array:
    """Standardised rows at length 1; a row of zeros stays."""
    rows = features if scale is None else standardize(features, scale)
    length: Array = np.linalg.norm(rows, axis=1, keepdims=True)
    length[length == 0] = 1
    unit: Array = rows / length
    return unit


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
    for start in range(0, len(labels), _VOTES):
        part = slice(start, start + _VOTES)
        rows = np.arange(len(labels[part]))[:, None] * classes
        votes = np.bincount(
            (rows + labels[part]).ravel(), weights[part].ravel(), minlength=len(rows) * classes
        )
        out[part] = votes.reshape(-1, classes).argmax(axis=1)
    return out
