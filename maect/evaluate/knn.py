"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
deviation (`knn_standardized`, what the authors' logger does).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect.errors import UserError
from maect.evaluate.job import Context, Job, idle_cpus
from maect.evaluate.store import Features
from maect.recipes.protocols import Knn

INPUTS = ("train", "test")
TEST_DATA = "knn_best and knn_standardized_best choose k and T on the test split; knn does not"
QUERIES = 256
TRAIN_ROWS = 16384
_GROUP = 32
# Candidates kept beyond k: their order is settled in float64, where equal samples are equal.
_SPARE = 32
_PAIRS = 512

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
    for _, part in _chunks(train):
        total += part.sum(axis=0, dtype=np.float64)
    mean = total / train.n
    total[:] = 0
    for _, part in _chunks(train):
        total += np.square(part - mean).sum(axis=0)
    deviation = np.sqrt(total / train.n)
    # Rounding leaves a trace of a deviation on a feature that is the same everywhere.
    constant = deviation <= 1e-6 * np.abs(mean)
    return mean.astype(np.float32), np.where(constant, 1, deviation).astype(np.float32)


def normalize(features: Array, scale: tuple[Array, Array] | None = None) -> Array:
    """Rows of length 1, standardised first if `scale` is given; a row of zeros stays one."""
    if scale is not None:
        features = (features - scale[0]) / scale[1]
    length = np.sqrt(np.square(features, dtype=np.float64).sum(axis=1, keepdims=True))
    return (features / np.maximum(length, 1e-12)).astype(np.float32)


def nearest(
    train: Features,
    queries: Array,
    k: int,
    scale: tuple[Array, Array] | None = None,
    threads: int = 1,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k most similar training samples of each query, most similar first.

    Exact, and independent of `threads`: every block of queries is one thread's. Candidates are
    found by float32 products and ranked in float64; the smaller id wins a tie. Memory: one chunk
    of the train set, one block of similarities per thread, k + 32 candidates per query.

    Args:
        train: the train set, read in chunks.
        queries: float32 [q, width].
        k: neighbours, at most train.n.
        scale: mean and deviation to standardise both sides with.
        threads: how many blocks of queries are worked on at once.

    Returns:
        Cosine similarities, float64 [q, k], and ids, int64 [q, k].
    """
    queries = normalize(queries, scale)
    keep = min(k + _SPARE, train.n)
    similarity = np.full((len(queries), keep), -np.inf, np.float32)
    ids = np.full((len(queries), keep), train.n, np.int64)
    blocks = [slice(s, min(s + QUERIES, len(queries))) for s in range(0, len(queries), QUERIES)]
    exact = np.full((len(queries), keep), -np.inf)
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        for start, part in _chunks(train):
            part = normalize(part, scale)

            def merge(block: slice, start: int = start, part: Array = part) -> None:
                found = queries[block] @ part.T
                # Twice as many at a time: soon most samples are farther than the candidates.
                first, last = 0, keep if start == 0 else len(part)
                while first < len(part):
                    _merge(similarity[block], ids[block], found[:, first:last], start + first)
                    first, last = last, 2 * last

            list(pool.map(merge, blocks))
        # A float32 product of unit vectors is off by hardly more than width / 2^24: what is farther
        # than the k-th by over twice that is none of the k.
        near = similarity >= similarity[:, k - 1 : k] - 3 * train.width / 2**24
        for start, part in _chunks(train):
            part = normalize(part, scale)

            def rank(block: slice, start: int = start, part: Array = part) -> None:
                place = ids[block] - start
                inside = near[block] & (place >= 0) & (place < len(part))
                _exact(exact[block], inside, place, queries[block], part)

            list(pool.map(rank, blocks))
    order = np.lexsort((ids, -exact), axis=1)[:, :k]
    return np.take_along_axis(exact, order, 1), np.take_along_axis(ids, order, 1)


def _chunks(features: Features) -> Iterator[tuple[int, Array]]:
    for start in range(0, features.n, TRAIN_ROWS):
        yield start, features.rows(start, min(start + TRAIN_ROWS, features.n))


def _merge(best: Array, ids: NDArray[np.int64], found: Array, start: int) -> None:
    """Merge similarities `found` [q, m] of the samples from `start` on into the sorted `best`.

    A sample of equal similarity does not replace an earlier one. Most samples are far away: the
    maximum over a group of them is compared first.
    """
    limit = best[:, -1:]
    groups = found.shape[1] // _GROUP
    whole = found[:, : groups * _GROUP].reshape(len(found), _GROUP, groups)
    row, group = np.nonzero(whole.max(axis=1) > limit)
    inside, place = np.nonzero(whole[row, :, group] > limit[row])
    rows = row[inside]
    columns = place * groups + group[inside]
    late, rest = np.nonzero(found[:, groups * _GROUP :] > limit)
    rows, columns = np.append(rows, late), np.append(columns, rest + groups * _GROUP)
    if not len(rows):
        return
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    touched, first, counts = np.unique(rows, return_index=True, return_counts=True)
    kept = best.shape[1]
    # Rows with few and with many candidates apart, so that padding does not dominate.
    for low, high in ((0, 8), (8, 64), (64, found.shape[1] + 1)):
        chosen = (counts > low) & (counts <= high)
        if not chosen.any():
            continue
        target, size = touched[chosen], counts[chosen]
        place = np.arange(size.max())
        valid = place < size[:, None]
        source = np.where(valid, first[chosen][:, None] + place, 0)
        values = np.where(valid, found[rows[source], columns[source]], -np.inf)
        values = np.concatenate([best[target], values], axis=1)
        names = np.concatenate([ids[target], columns[source] + start], axis=1)
        top = np.argsort(-values, axis=1, kind="stable")[:, :kept]
        best[target] = np.take_along_axis(values, top, 1)
        ids[target] = np.take_along_axis(names, top, 1)


def _exact(
    exact: NDArray[np.float64],
    inside: NDArray[np.bool_],
    places: NDArray[np.int64],
    queries: Array,
    part: Array,
) -> None:
    """Fill in the float64 similarities of the candidates that lie `inside` the chunk `part`.

    A sum of products row by row, not a matrix product, whose rounding depends on the position.
    """
    rows, columns = np.nonzero(inside)
    for first in range(0, len(rows), _PAIRS):
        row, column = rows[first : first + _PAIRS], columns[first : first + _PAIRS]
        products = part[places[row, column]].astype(np.float64)
        products *= queries[row]
        exact[row, column] = products.sum(axis=1)


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
