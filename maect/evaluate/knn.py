"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
standard deviation (`knn_standardized`, what the authors' logger does).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.outcomes import held_out_for
from maect.evaluate.protocols.stored_features import Knn
from maect.evaluate.real import real_labels_of
from maect.evaluate.store import Array, Correction, moments, standardize, unit
from maect.measures import vote

QUERIES = 1024
TRAIN_ROWS = 16384
Pair = tuple[int, float]
"""A number of neighbours, k, and a temperature, T."""


def evaluate(settings: Knn, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Metrics in percent: `knn`, `knn_standardized`, and the full sweep over k and T.

    docs/reference/neighbours_and_clusters.md lists the metrics.
    """
    train, test = job.train_and_test()
    if settings.k > train.n:
        raise UserError(f"knn: k {settings.k} is more than the {train.n} samples of {train.path}")
    real = real_labels_of(settings, test.names, test.record["class_names"], test.labels)
    held = held_out_for(train.labels, train.contents(), test.n)
    metrics: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    outcomes: dict[str, NDArray[np.bool_]] = {}
    threads = idle_cpus(context)
    own = (settings.k, settings.temperature)
    for name, standardized in (("knn", False), ("knn_standardized", True)):
        correct = partial(standardize, scale=moments(train.values)) if standardized else None
        sweep = sweep_settings(
            settings, train.values, train.labels, held, test.values, correct, threads
        )
        right = {pair: classes == test.labels for pair, classes in sweep.votes.items()}
        accuracy = {pair: 100 * int(np.sum(hits)) / test.n for pair, hits in right.items()}
        for k, t in sweep.votes:
            row = {"k": k, "temperature": t, "standardized": standardized}
            rows.append(row | {"accuracy": accuracy[k, t], "held_out": sweep.held_out.get((k, t))})
        metrics[name], outcomes[name] = accuracy[own], right[own]
        if real is not None:
            metrics[f"{name}_real"] = real.accuracy(sweep.votes[own])
        metrics[f"{name}_best"] = max(accuracy.values())
        of_own = [value for (_, t), value in accuracy.items() if t == settings.temperature]
        metrics[f"{name}_best_k"] = max(of_own)
        if (best := sweep.chosen) is not None:
            metrics[f"{name}_held_out"] = accuracy[best]
            outcomes[f"{name}_held_out"] = right[best]
    return {**metrics, **job.keep_outcomes(outcomes), "sweep": rows}


@dataclass(frozen=True)
class Sweep:
    """Votes by every k and temperature, and the choice among them.

    Attributes:
        votes: on the queries, int64 [q].
        held_out: percent of the held-out training samples that the others' votes get right; of
            those pairs that are possible without the held-out samples.
    """

    votes: dict[Pair, NDArray[np.int64]]
    held_out: dict[Pair, float]

    @property
    def chosen(self) -> Pair | None:
        """Return the pair of the highest `held_out`, of equal ones the first; None without any."""
        return max(self.held_out, key=self.held_out.__getitem__, default=None)


def sweep_settings(
    settings: Knn,
    train: Array,
    labels: NDArray[np.int64],
    held: NDArray[np.bool_],
    queries: Array,
    correct: Correction | None,
    threads: int,
) -> Sweep:
    """Vote by every pair of the settings' grid, on queries and on held-out training samples.

    `maect compare` calls it, too, so both have one grid and one way to choose.

    Args:
        train: float32 [n, width].
        labels: of the training samples, int64 [n].
        held: which of these are held out, bool [n].
        queries: float32 [q, width].
        correct: both sides are corrected by it.
    """
    grid = settings.grid(len(train))
    votes = votes_by_setting(train, labels, queries, grid, correct, threads)
    ids = np.flatnonzero(~held)
    fitting = [(k, t) for k, t in grid if k <= len(ids)]
    if not held.any() or not fitting:
        return Sweep(votes, {})
    inner = votes_by_setting(train, labels, train[held], fitting, correct, threads, among=ids)
    right = {pair: 100 * float(np.mean(v == labels[held])) for pair, v in inner.items()}
    return Sweep(votes, right)


def votes_by_setting(
    train: Array,
    labels: NDArray[np.int64],
    queries: Array,
    grid: Sequence[Pair],
    correct: Correction | None,
    threads: int,
    among: NDArray[np.int64] | None = None,
) -> dict[Pair, NDArray[np.int64]]:
    """Return the neighbours' vote on each query, int64 [q], by every k and temperature."""
    most = max(k for k, _ in grid)
    similarity, ids = nearest(train, queries, most, correct, threads, among=among)
    return {(k, t): vote(similarity[:, :k], labels[ids[:, :k]], t) for k, t in grid}


def nearest(
    train: Array,
    queries: Array,
    k: int,
    correct: Correction | None = None,
    threads: int = 1,
    distance: Literal["cosine", "l2"] = "cosine",
    among: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Find the k most similar training samples of each query, most similar first.

    Products of unit vectors in blocks of one size, each by one thread: the number of threads does
    not change a bit. Of the k, equal similarities are in the order of their ids; which of several
    at the border are among the k is not said. (Cosines in float64 and a search by hand took 0.9 to
    1.1 times as long, and put 0.03 % of the neighbours, equal up to float32's rounding, elsewhere.)
    Memory: a chunk of the train set, the queries, and a block of products for each thread.

    Args:
        train: float32 [n, width].
        queries: float32 [q, width].
        k: neighbours, at most as many as are compared.
        correct: both sides are corrected by it, such as standardised.
        among: ids of the training samples that are compared, rising; None: all.

    Returns:
        Cosine similarities (of a row of zeros: 0) or, of `l2`, negative squared distances up to
        what depends on the query alone, float64 [q, k]; and ids, int64 [q, k].
    """

    def prepared(features: Array) -> Array:
        corrected = features if correct is None else correct(features)
        return unit(corrected) if distance == "cosine" else corrected

    asked = prepared(queries)
    compared = np.arange(len(train)) if among is None else among
    best = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.zeros((len(queries), k), np.int64)
    blocks = [slice(start, start + QUERIES) for start in range(0, len(queries), QUERIES)]
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(compared), TRAIN_ROWS):
            part = compared[start : start + TRAIN_ROWS]
            rows = prepared(train[part])
            squares = np.square(rows).sum(axis=1) if distance == "l2" else np.float32(0)

            def merge(
                block: slice,
                part: NDArray[np.int64] = part,
                rows: Array = rows,
                squares: Any = squares,
            ) -> None:
                products = asked[block] @ rows.T
                if distance == "l2":
                    products += products - squares
                least = max(0, len(rows) - k)
                top = np.argpartition(products, least, axis=1)[:, least:]
                near = np.take_along_axis(products, top, axis=1)
                values = np.concatenate([best[block], near], axis=1)
                names = np.concatenate([ids[block], part[top]], axis=1)
                order = np.lexsort((names, -values), axis=1)[:, :k]
                best[block] = np.take_along_axis(values, order, axis=1)
                ids[block] = np.take_along_axis(names, order, axis=1)

            list(pool.map(merge, blocks))
    return best.astype(np.float64), ids
