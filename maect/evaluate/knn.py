"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
standard deviation (`knn_standardized`, what the authors' logger does).

`KnnPerBlock` does the same on the output of every block, from one forward pass. The best block of a
large masked autoencoder is below its last ones, which work for the decoder (MIM-Refiner, Alkin et
al. 2025). Tuning and refinement are to move it to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.evaluate.base import (
    Count,
    Encodes,
    EvaluationJob,
    ImageCount,
    Positive,
    ReadsFeatures,
    idle_cpus,
)
from maect.evaluate.real import RealLabels
from maect.recipes import KNN_K, KNN_TEMPERATURE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.encoding import Encoding
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

    def grid(self, most: int) -> list[tuple[int, float]]:
        """Return all pairs of k and temperature; k of the sweep only up to `most`."""
        counts = sorted({self.k, *(k for k in self.sweep if k <= most)})
        return [(k, t) for k in counts for t in sorted({self.temperature, *self.temperatures})]

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Metrics in percent: `knn`, `knn_standardized`, and the full sweep over k and T.

        docs/reference/neighbours_and_clusters.md lists the metrics.
        """
        import numpy as np

        from maect.evaluate.sampling import held_out_mask, held_out_share
        from maect.evaluate.store import Rows, moments

        train, test = job.train_and_test()
        if self.k > train.n:
            raise UserError(f"knn: k {self.k} is more than the {train.n} samples of {train.path}")
        grid = self.grid(train.n)
        real = self.real_labels_of(test.names, test.record["class_names"], test.labels)
        held = held_out_mask(train.labels, train.contents(), held_out_share(train.n, test.n))
        ids = np.flatnonzero(~held)
        queries = train.take(np.flatnonzero(held))
        part = Rows(len(ids), train.width, lambda start, stop: train.take(ids[start:stop]))
        metrics: dict[str, Any] = {}
        sweep: list[dict[str, Any]] = []
        correct: dict[str, NDArray[np.bool_]] = {}
        threads = idle_cpus(context)
        own = (self.k, self.temperature)
        fitting = [(k, t) for k, t in grid if k <= part.n] if held.any() else []
        for name, standardized in (("knn", False), ("knn_standardized", True)):
            scale = moments(train) if standardized else None
            voted = votes_by_setting(train, train.labels, test.all(), grid, scale, threads)
            right = {pair: classes == test.labels for pair, classes in voted.items()}
            inner: dict[tuple[int, float], float] = {}
            if fitting:
                votes = votes_by_setting(part, train.labels[ids], queries, fitting, scale, threads)
                wanted = train.labels[held]
                inner = {pair: 100 * float(np.mean(v == wanted)) for pair, v in votes.items()}
            accuracy = {pair: 100 * int(np.sum(hits)) / test.n for pair, hits in right.items()}
            for k, t in grid:
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
        return {**metrics, **job.keep_outcomes(correct), "sweep": sweep}


def votes_by_setting(
    train: FeatureFile | Rows,
    labels: NDArray[np.int64],
    queries: Array,
    grid: Sequence[tuple[int, float]],
    scale: Scale | None,
    threads: int,
) -> dict[tuple[int, float], NDArray[np.int64]]:
    """Return the neighbours' vote on each query, int64 [q], by every k and temperature."""
    from maect.measures import vote

    similarity, ids = nearest(train, queries, max(k for k, _ in grid), scale, threads)
    return {(k, t): vote(similarity[:, :k], labels[ids[:, :k]], t) for k, t in grid}


def nearest(
    train: FeatureFile | Rows,
    queries: Array,
    k: int,
    scale: Scale | None = None,
    threads: int = 1,
    distance: Literal["cosine", "l2"] = "cosine",
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Find the k most similar training samples of each query, most similar first.

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


class KnnPerBlock(Encodes):
    """k-NN on the raw output of every block, from one forward pass over both splits."""

    name: ClassVar[str] = "knn_per_block"
    title: ClassVar[str] = "k-NN per block"
    test_data: ClassVar[str | None] = (
        "best_block is chosen on the test split, held_out_block on training images"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    pooling: Literal["cls", "mean"] | None = None
    """What is read of a block: [CLS], or the mean of the patch tokens; none: what the encoder's
    file says."""
    train_images: int = Field(default=131072, gt=0)
    """At most this many training images, evenly spaced: a tenth of ImageNet."""

    def encoded(self, images: ImageCount) -> float:
        """Count the training images that take part, and every test image, once."""
        train = evenly(images(self.train_split), self.train_images)
        return len(train) + images(self.test_split)

    def headline(self) -> dict[str, str]:
        """Accuracies of the last block and of the one that held-out training images choose."""
        blocks = {"last": "last block", "held_out": "block chosen on held-out training images"}
        return {f"knn_standardized_{key}": f"{self.title}, {of}" for key, of in blocks.items()}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: lists `knn` and `knn_standardized`, a value a block, in order.

        `knn_last` and `knn_standardized_last` are of the last block, before the final norm;
        `best_block`, from 1, is the first of the highest standardised accuracy. `held_out_block` is
        that of held-out training images, found among the others; `knn_standardized_held_out` is
        its accuracy on the test images.
        """
        import numpy as np
        import torch

        from maect.core import distributed
        from maect.evaluate.encoding import Encoding
        from maect.evaluate.probe_training import check_splits
        from maect.evaluate.sampling import held_out_mask, held_out_share
        from maect.evaluate.store import in_memory, moments
        from maect.measures import vote
        from maect.train.scores import BATCH

        train, test = open_index(job.path("train")), open_index(job.path("test"))
        check_splits(train, test)
        chosen = evenly(train.n, self.train_images)
        if self.k > len(chosen):
            raise UserError(
                f"{train.directory}: {len(chosen)} of its images are compared with, and k is "
                f"{self.k}; lower k or raise train_images"
            )
        path = job.run / "encoder.safetensors"
        device = distributed.device_of(context)
        encoding = Encoding(
            path, device, self.precision, blocks=10**9, pooling=self.pooling, norm=False
        )
        labels = train.labels[chosen.start : chosen.stop : chosen.step]
        contents = train.contents[chosen.start : chosen.stop : chosen.step].tolist()
        held = held_out_mask(labels, contents, held_out_share(len(chosen), test.n))
        held &= len(chosen) - held.sum() >= self.k
        inner = np.zeros(encoding.blocks)
        share = distributed.share_of(context, test.n, BATCH)
        truth = test.labels[share.start : share.stop]
        hits = torch.zeros(2, encoding.blocks, dtype=torch.float64)
        with distributed.process_group(context):
            known = _encoded(context, job, train, encoding, chosen)
            asked = _encoded(context, job, test, encoding, range(test.n))
            for number in range(encoding.blocks):
                parts = torch.from_numpy(known[number])
                values = distributed.gather_rows(parts)[: len(chosen)].numpy()
                rows = in_memory(values)
                scales = None, moments(rows)
                if context.rank == 0 and held.any():
                    others = in_memory(values[~held])
                    queries = values[held]
                    near, ids = nearest(others, queries, self.k, scales[1], max(1, context.cpus))
                    votes = vote(near, labels[~held][ids], self.temperature)
                    inner[number] = 100 * (votes == labels[held]).mean()
                if not len(truth):
                    continue
                threads = max(1, context.cpus)
                for kind, scale in enumerate(scales):
                    near, ids = nearest(rows, asked[number, : len(share)], self.k, scale, threads)
                    votes = vote(near, labels[ids], self.temperature)
                    hits[kind, number] = int((votes == truth).sum())
            plain, standardized = (100 * distributed.sum_over_ranks(hits) / test.n).tolist()
        best = int(inner.argmax())
        chosen_inside = {
            "knn_standardized_held_out": standardized[best],
            "held_out_block": 1 + best,
            "held_out": inner.tolist(),
        }
        return {
            "knn": plain,
            "knn_standardized": standardized,
            "knn_last": plain[-1],
            "knn_standardized_last": standardized[-1],
            "best_block": 1 + standardized.index(max(standardized)),
            **(chosen_inside if held.any() else {}),
        }


def evenly(n: int, most: int) -> range:
    """Return at most `most` rows of n, evenly spaced from the first."""
    return range(0, n, max(1, -(-n // most)))


def _encoded(
    context: Context, job: EvaluationJob, index: Index, encoding: Encoding, rows: range
) -> Array:
    """Encode this rank's share of some images after every block, float32 [blocks, m, width].

    As many rows on every rank, with zeros behind the last image.
    """
    import numpy as np

    from maect.evaluate.encoding import check_finite
    from maect.train.scores import BATCH, share

    part = replace(index, rows=index.rows[rows.start : rows.stop : rows.step])
    blocks = encoding.blocks
    width = encoding.settings.width
    count = -(-part.n // (context.world_size * BATCH)) * BATCH
    out = np.zeros((blocks, count, width), np.float32)
    start = 0
    size = encoding.settings.image_size
    device = encoding.device
    for images, _, _ in share(context, part, device, size, job.resize):
        features = encoding(images)
        check_finite(features, job.run)
        by_block = features.view(len(images), blocks, width).transpose(0, 1)
        out[:, start : start + len(images)] = by_block.cpu().numpy()
        start += len(images)
    return out
