"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
standard deviation (`knn_standardized`, what the authors' logger does).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, EvaluationJob, Positive, ReadsFeatures, idle_cpus
from maect.evaluate.real import RealLabels
from maect.recipes import KNN_K, KNN_TEMPERATURE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array, FeatureFile, Rows, Scale

QUERIES = 1024
TRAIN_ROWS = 16384


class Knn(RealLabels, ReadsFeatures):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "k-nearest neighbours"
    test_data: ClassVar[str | None] = (
        "knn_best_k chooses k and knn_best k and T on the test split, with and without "
        "standardisation; knn and knn_standardized choose nothing, those called _held_out "
        "choose on training images"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)

    def headline(self) -> dict[str, str]:
        """Accuracies by the set k and T, and by those that held-out training images choose."""
        by = "k and T chosen on held-out training images"
        forms = {"knn": "k-NN", "knn_standardized": "k-NN, standardised"}
        return forms | {f"{key}_held_out": f"{title}, {by}" for key, title in forms.items()}

    def pairs(self, most: int) -> list[tuple[int, float]]:
        """Every k, of the sweep those up to `most`, by every temperature."""
        counts = sorted({self.k, *(k for k in self.sweep if k <= most)})
        return [(k, t) for k in counts for t in sorted({self.temperature, *self.temperatures})]

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Metrics in percent: `knn`, `knn_standardized`, and the full sweep over k and T.

        docs/reference/neighbours_and_clusters.md lists the metrics.
        """
        import numpy as np

        from maect.evaluate.sampling import held_out, held_out_share
        from maect.evaluate.store import Rows, moments

        train, test = job.both()
        if self.k > train.n:
            raise UserError(f"knn: k {self.k} is more than the {train.n} samples of {train.path}")
        pairs, real = (
            self.pairs(train.n),
            self.reassessed(test.names, test.record["class_names"], test.labels),
        )
        held = held_out(train.labels, train.contents(), held_out_share(train.n, test.n))
        ids, queries = np.flatnonzero(~held), train.take(np.flatnonzero(held))
        part = Rows(len(ids), train.width, lambda start, stop: train.take(ids[start:stop]))
        metrics: dict[str, Any] = {}
        sweep: list[dict[str, Any]] = []
        correct: dict[str, NDArray[np.bool_]] = {}
        threads, own = idle_cpus(context), (self.k, self.temperature)
        fitting = [(k, t) for k, t in pairs if k <= part.n] if held.any() else []
        for name, standardized in (("knn", False), ("knn_standardized", True)):
            scale = moments(train) if standardized else None
            voted = swept(train, train.labels, test.all(), pairs, scale, threads)
            right = {pair: classes == test.labels for pair, classes in voted.items()}
            inner: dict[tuple[int, float], float] = {}
            if fitting:
                votes = swept(part, train.labels[ids], queries, fitting, scale, threads)
                wanted = train.labels[held]
                inner = {pair: 100 * float(np.mean(v == wanted)) for pair, v in votes.items()}
            accuracy = {pair: 100 * int(np.sum(hits)) / test.n for pair, hits in right.items()}
            for k, t in pairs:
                row = {"k": k, "temperature": t, "standardized": standardized}
                sweep.append(row | {"accuracy": accuracy[k, t], "held_out": inner.get((k, t))})
            metrics[name], correct[name] = accuracy[own], right[own]
            if real is not None:
                metrics[f"{name}_real"] = real.accuracy(voted[own])
            metrics[f"{name}_best"] = max(accuracy.values())
            of_own = [value for (_, t), value in accuracy.items() if t == self.temperature]
            metrics[f"{name}_best_k"] = max(of_own)
            if inner:
                best = max(inner, key=inner.__getitem__)  # of equal ones the first
                metrics[f"{name}_held_out"] = accuracy[best]
                correct[f"{name}_held_out"] = right[best]
        return {**metrics, **job.scored(correct), "sweep": sweep}


def swept(
    train: FeatureFile | Rows,
    labels: NDArray[np.int64],
    queries: Array,
    pairs: Sequence[tuple[int, float]],
    scale: Scale | None,
    threads: int,
) -> dict[tuple[int, float], NDArray[np.int64]]:
    """Vote of the neighbours of each query, int64 [q], by every k and temperature."""
    from maect.measures import vote

    similarity, ids = nearest(train, queries, max(k for k, _ in pairs), scale, threads)
    return {(k, t): vote(similarity[:, :k], labels[ids[:, :k]], t) for k, t in pairs}


def nearest(
    train: FeatureFile | Rows,
    queries: Array,
    k: int,
    scale: Scale | None = None,
    threads: int = 1,
    distance: Literal["cosine", "l2"] = "cosine",
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k most similar training samples of each query, most similar first.

    Products of unit vectors in blocks of one size, each by one thread: the number of threads does
    not change a bit. Of the k, equal similarities are in the order of their ids; which of several
    at the border are among the k is not said. (Cosines in float64 and a search by hand took 0.9 to
    1.1 times as long, and put 0.03 % of the neighbours, equal up to float32's rounding, elsewhere.)
    Memory: a chunk of the train set, the queries, and a block of products for each thread.

    Args:
        queries: float32 [q, width].
        k: neighbours, at most train.n.
        scale: mean and standard deviation to standardise both sides with.

    Returns:
        Cosine similarities (of a row of zeros: 0) or, of `l2`, negative squared distances up to
        what depends on the query alone, float64 [q, k]; and ids, int64 [q, k].
    """

    import numpy as np

    from maect.evaluate.clusters import comparable
    from maect.evaluate.store import standardize

    def prepared(features: Array) -> Array:
        if distance == "cosine":
            return comparable(features, scale)
        return features if scale is None else standardize(features, scale)

    unit = prepared(queries)
    best = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.zeros((len(queries), k), np.int64)
    blocks = [slice(start, start + QUERIES) for start in range(0, len(queries), QUERIES)]
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        for start in range(0, train.n, TRAIN_ROWS):
            rows = prepared(train.rows(start, min(start + TRAIN_ROWS, train.n)))
            squares = np.square(rows).sum(axis=1) if distance == "l2" else np.float32(0)

            def merge(
                block: slice, start: int = start, rows: Array = rows, squares: Any = squares
            ) -> None:
                products = unit[block] @ rows.T
                if distance == "l2":
                    products += products - squares
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
