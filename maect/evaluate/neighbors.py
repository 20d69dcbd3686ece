"""Exact nearest neighbours by cosine similarity, on any number of threads, in bounded memory.

Float32 products of unit vectors find candidates; their cosines are computed in float64, row by row,
so that rows with the same bits have the same similarity wherever they stand.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect.evaluate.store import FeatureFile

QUERIES = 1024
TRAIN_ROWS = 16384
COLUMNS = 2048  # of a product at a time: it stays in the cache
# Candidates beyond k: as many may be as near as the k-th before the slow way is taken.
_SPARE = 32
_PAIRS = 512
_VOTES = 256
_AT_ONCE = 2**24  # float64 products of the slow way in memory, for each thread

Array = NDArray[np.float32]
Double = NDArray[np.float64]
Scale = tuple[Array, Array]


def standardize(features: Array, scale: Scale | None) -> Array:
    """(x - mean) / deviation; without `scale` the features themselves."""
    return features if scale is None else (features - scale[0]) / scale[1]


def moments(train: FeatureFile) -> tuple[Array, Array]:
    """Mean and standard deviation of each feature over the train set, 1 where it does not vary.

    Biased variance, as scikit-learn's StandardScaler; summed in float64 in chunks.
    """
    total = np.zeros(train.width)
    starts = range(0, train.n, TRAIN_ROWS)
    for start in starts:
        total += train.rows(start, min(start + TRAIN_ROWS, train.n)).sum(axis=0, dtype=np.float64)
    mean = total / train.n
    total[:] = 0
    for start in starts:
        total += np.square(train.rows(start, min(start + TRAIN_ROWS, train.n)) - mean).sum(axis=0)
    deviation = np.sqrt(total / train.n)
    # Rounding leaves a trace of a spread on a feature that is the same everywhere.
    constant = deviation <= 1e-6 * np.abs(mean)
    return mean.astype(np.float32), np.where(constant, 1, deviation).astype(np.float32)


def lengths(features: Array) -> Double:
    """Euclidean length of each row, float64 [n]; the same bits for the same row."""
    out = np.empty(len(features))
    for start in range(0, len(features), _PAIRS):
        rows = features[start : start + _PAIRS].astype(np.float64)
        out[start : start + _PAIRS] = np.sqrt(np.square(rows, out=rows).sum(axis=1))
    return out


def nearest(
    train: FeatureFile, queries: Array, k: int, scale: Scale | None = None, threads: int = 1
) -> tuple[Double, NDArray[np.int64]]:
    """The k most similar training samples of each query, most similar first.

    Of equal similarities the smaller id comes first. The result depends neither on `threads` nor
    on the size of the blocks. Memory: two chunks of the train set (one is read ahead) and the unit
    vectors of one, those of the queries, a block of products for each thread, k + 32 candidates for
    each query.

    Args:
        train: the train set, read in chunks.
        queries: float32 [q, width].
        k: neighbours, at most train.n.
        scale: mean and deviation to standardise both sides with.
        threads: how many blocks of queries are worked on at once.

    Returns:
        Cosine similarities (of a row of zeros: 0), float64 [q, k], and ids, int64 [q, k].
    """
    queries = standardize(queries, scale)
    exact = np.empty((len(queries), k))
    ids = np.empty((len(queries), k), np.int64)
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        blocks = _blocks(len(queries), QUERIES)
        of_queries = np.concatenate([*pool.map(lengths, (queries[b] for b in blocks)), []])
        units = list(pool.map(_unit, (queries[b] for b in blocks), (of_queries[b] for b in blocks)))
        products, candidates = _candidates(train, units, min(k + _SPARE, train.n), scale, pool)
        # A product is off by hardly more than width / 2^24: what is farther than the k-th by over
        # twice that is none of the k. Where that leaves no candidate out there may be more of them.
        margin = 3 * (train.width + 4) / 2**24
        near = products >= products[:, k - 1 : k] - margin
        unsettled = near[:, -1] & (near.shape[1] < train.n)
        near[unsettled] = False
        cosines = np.full(products.shape, -np.inf)
        for chunk in _ahead(train, scale, pool):
            known = (cosines, near, candidates, queries, of_queries, *chunk)
            list(pool.map(partial(_rank, *known), blocks))

        def put_in_order(block: slice) -> None:
            order = np.lexsort((candidates[block], -cosines[block]), axis=1)[:, :k]
            exact[block] = np.take_along_axis(cosines[block], order, 1)
            ids[block] = np.take_along_axis(candidates[block], order, 1)

        list(pool.map(put_in_order, blocks))
        slow = np.flatnonzero(unsettled)

        def settle(block: slice) -> None:
            rows = slow[block]
            exact[rows], ids[rows] = _among_all(train, queries[rows], k, scale)

        list(pool.map(settle, _blocks(len(slow), max(1, _AT_ONCE // train.n))))
    return exact, ids


def _blocks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _chunk(train: FeatureFile, scale: Scale | None, start: int) -> tuple[int, Array, Double]:
    """First id, standardised rows and their lengths."""
    part = standardize(train.rows(start, min(start + TRAIN_ROWS, train.n)), scale)
    return start, part, lengths(part)


def _ahead(
    train: FeatureFile, scale: Scale | None, pool: Executor
) -> Iterator[tuple[int, Array, Double]]:
    """All chunks, the next one read while the last one is worked on."""
    coming = pool.submit(_chunk, train, scale, 0)
    for start in range(TRAIN_ROWS, train.n + TRAIN_ROWS, TRAIN_ROWS):
        chunk = coming.result()
        if start < train.n:
            coming = pool.submit(_chunk, train, scale, start)
        yield chunk


def _unit(features: Array, length: Double) -> Array:
    return (features / np.where(length > 0, length, 1)[:, None]).astype(np.float32)


def _candidates(
    train: FeatureFile, units: list[Array], keep: int, scale: Scale | None, pool: Executor
) -> tuple[Array, NDArray[np.int64]]:
    """The `keep` largest float32 products of each query, largest first, and whose they are.

    `units` are the blocks of queries, of length 1.
    """
    count = sum(map(len, units))
    best = np.full((count, keep), -np.inf, np.float32)
    ids = np.full((count, keep), train.n, np.int64)
    blocks = _blocks(count, QUERIES)
    for start, part, of_part in _ahead(train, scale, pool):
        inside = _blocks(len(part), COLUMNS)
        pieces = list(pool.map(_unit, (part[i] for i in inside), (of_part[i] for i in inside)))

        def search(number: int, start: int = start, pieces: list[Array] = pieces) -> None:
            block = blocks[number]
            limit, found = best[block, -1:], []
            for piece in pieces:
                products = units[number] @ piece.T
                chosen, limit = _above(products, limit, keep)
                rows = (chosen // len(piece)).astype(np.int16)  # sorted the fastest
                found.append((rows, chosen % len(piece) + start, products.ravel()[chosen]))
                start += len(piece)
            _merge(best[block], ids[block], *map(np.concatenate, zip(*found, strict=True)))

        list(pool.map(search, range(len(blocks))))
    return best, ids


def _above(products: Array, limit: Array, keep: int) -> tuple[NDArray[np.int64], Array]:
    """Places of the products [q, m] above the limit [q, 1], and a higher limit if they are many.

    They are many at the start, and if the samples are ever nearer: then the `keep` largest do.
    """
    chosen = np.flatnonzero(products > limit)
    columns = products.shape[1]
    if len(chosen) > 2 * keep * len(products) and columns > keep:
        least = np.partition(products, columns - keep, axis=1)[:, [columns - keep]]
        limit = np.maximum(limit, np.nextafter(least, np.float32(-np.inf)))
        chosen = np.flatnonzero(products > limit)
    return chosen, limit


def _merge(
    best: Array,
    ids: NDArray[np.int64],
    rows: NDArray[np.int16],
    samples: NDArray[np.int64],
    found: Array,
) -> None:
    """Merge products `found` of some rows and later samples into the sorted `best` [q, keep].

    A sample of equal product does not replace an earlier one.
    """
    if not len(rows):
        return
    keep = best.shape[1]
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    counts = np.bincount(rows, minlength=len(best))
    touched = np.flatnonzero(counts)
    slot = (np.cumsum(counts > 0) - 1)[rows]
    place = keep + np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    values = np.full((len(touched), keep + counts.max()), -np.inf, np.float32)
    names = np.zeros(values.shape, np.int64)
    values[:, :keep], names[:, :keep] = best[touched], ids[touched]
    values[slot, place], names[slot, place] = found[order], samples[order]
    top = np.argsort(-values, axis=1, kind="stable")[:, :keep]
    best[touched] = np.take_along_axis(values, top, 1)
    ids[touched] = np.take_along_axis(names, top, 1)


def _cosines(
    rows: Array, of_rows: Double, queries: Array, of_queries: Double | np.float64
) -> Double:
    """Cosine of each row and its query (or the one query), given their lengths, float64 [n].

    A sum of products row by row, not a matrix product, whose rounding depends on the position.
    """
    out = np.empty(len(rows))
    for block in _blocks(len(rows), _PAIRS):
        products = rows[block].astype(np.float64)
        products *= queries[block] if len(queries) > 1 else queries
        out[block] = products.sum(axis=1)
    length = of_rows * of_queries
    return out / np.where(length > 0, length, 1)


def _rank(
    cosines: Double,
    near: NDArray[np.bool_],
    candidates: NDArray[np.int64],
    queries: Array,
    of_queries: Double,
    start: int,
    part: Array,
    of_part: Double,
    block: slice,
) -> None:
    """Fill in the cosines of a block's near candidates that lie in the chunk `part`."""
    place = candidates[block] - start
    rows, columns = np.nonzero(near[block] & (place >= 0) & (place < len(part)))
    place = place[rows, columns]
    for some in _blocks(len(rows), _PAIRS):
        row, name = rows[some], place[some]
        cosines[block][row, columns[some]] = _cosines(
            part[name], of_part[name], queries[block][row], of_queries[block][row]
        )


def _among_all(
    train: FeatureFile, queries: Array, k: int, scale: Scale | None
) -> tuple[Double, NDArray[np.int64]]:
    """As `nearest`, for what is too close together for float32: float64 products of all samples."""
    of_queries = lengths(queries)
    cosines = np.empty((len(queries), train.n))
    starts = range(0, train.n, TRAIN_ROWS)
    for start, part, of_part in (_chunk(train, scale, start) for start in starts):
        length = of_queries[:, None] * of_part
        products = queries.astype(np.float64) @ part.astype(np.float64).T
        cosines[:, start : start + len(part)] = products / np.where(length > 0, length, 1)
    kth = np.partition(cosines, train.n - k, axis=1)[:, [train.n - k]]
    near = cosines >= kth - 3 * (train.width + 4) / 2**53
    for start, part, of_part in (_chunk(train, scale, start) for start in starts):
        for number, row in enumerate(near[:, start : start + len(part)]):
            names = np.flatnonzero(row)
            cosines[number, start + names] = _cosines(
                part[names], of_part[names], queries[number : number + 1], of_queries[number]
            )
    exact = np.empty((len(queries), k))
    ids = np.empty((len(queries), k), np.int64)
    for number, row in enumerate(near):
        names = np.flatnonzero(row)
        order = np.lexsort((names, -cosines[number, names]))[:k]
        exact[number], ids[number] = cosines[number, names[order]], names[order]
    return exact, ids


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
