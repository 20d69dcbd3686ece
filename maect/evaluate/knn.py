"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
standard deviation (`knn_standardized`, what the authors' logger does).

`KnnPerBlock` does the same on the output of every block, from one forward pass. The best block of a
large masked autoencoder is below its last ones, which work for the decoder (MIM-Refiner, Alkin et
al. 2025). Tuning and refinement are to move it to the end.

`Agreement` needs no labels: it asks whether what is found near an image depends on how the image
was cropped. Collapsed features agree, too, so that alignment (Wang and Isola 2020) is reported with
uniformity and RankMe (Garrido et al. 2023).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.data.loader import view_parts
from maect.data.transforms import augment
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.clustering import unit
from maect.evaluate.features import Encoding, check_finite
from maect.evaluate.outcomes import held_out_for
from maect.evaluate.probe_training import check_splits
from maect.evaluate.protocols.encoders import Agreement, KnnPerBlock
from maect.evaluate.protocols.stored_features import Knn
from maect.evaluate.real import real_labels_of
from maect.evaluate.store import Array, Correction, moments, standardize
from maect.measures import alignment, rank_me, uniformity, vote
from maect.recipes import View
from maect.train.scores import BATCH, encode_share

QUERIES = 1024
TRAIN_ROWS = 16384
DECODED = 256
"""Images whose views are decoded together."""
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


def evaluate_per_block(
    settings: KnnPerBlock, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Accuracies in percent: lists `knn` and `knn_standardized`, a value a block, in order.

    `knn_last` and `knn_standardized_last` are of the last block, before the final norm;
    `best_block`, from 1, is the first of the highest standardised accuracy. `held_out_block` is
    that of held-out training images, found among the others; `knn_standardized_held_out` is
    its accuracy on the test images.
    """
    train, test = open_index(job.path("train")), open_index(job.path("test"))
    check_splits(train, test)
    chosen = settings.compared(train.n)
    if settings.k > len(chosen):
        raise UserError(
            f"{train.directory}: {len(chosen)} of its images are compared with, and k is "
            f"{settings.k}; lower k or raise train_images"
        )
    encoding = Encoding(
        job.encoder,
        distributed.device_of(context),
        settings.precision,
        blocks=10**9,
        pooling=settings.pooling,
        norm=False,
    )
    compared = replace(train, rows=train.rows[chosen.start : chosen.stop : chosen.step])
    labels = compared.labels
    held = held_out_for(labels, compared.contents.tolist(), test.n)
    if len(chosen) - held.sum() < settings.k:
        held[:] = False
    inner = np.zeros(encoding.blocks)
    mine = distributed.share_of(context, test.n, BATCH)
    truth = test.labels[mine.start : mine.stop]
    hits = torch.zeros(2, encoding.blocks, dtype=torch.float64)
    threads = max(1, context.cpus)

    def read(images: torch.Tensor) -> torch.Tensor:
        features = encoding(images)
        check_finite(features, job.run)
        return features.view(len(images), encoding.blocks, -1).cpu()

    with distributed.process_group(context):
        device, size = encoding.device, encoding.settings.image_size
        known = encode_share(context, compared, device, size, job.resize, read)
        asked = encode_share(context, test, device, size, job.resize, read)
        for number in range(encoding.blocks):
            values = distributed.gather_rows(known[:, number].contiguous())[: len(chosen)].numpy()
            queries = asked[: len(mine), number].contiguous().numpy()
            standardized = partial(standardize, scale=moments(values))
            if context.rank == 0 and held.any():
                others = np.flatnonzero(~held)
                near, ids = nearest(
                    values, values[held], settings.k, standardized, threads, among=others
                )
                votes = vote(near, labels[ids], settings.temperature)
                inner[number] = 100 * (votes == labels[held]).mean()
            if not len(truth):
                continue
            for kind, correct in enumerate((None, standardized)):
                near, ids = nearest(values, queries, settings.k, correct, threads)
                votes = vote(near, labels[ids], settings.temperature)
                hits[kind, number] = int((votes == truth).sum())
        plain, corrected = (100 * distributed.sum_over_ranks(hits) / test.n).tolist()
    best = int(inner.argmax())
    chosen_inside = {
        "knn_standardized_held_out": corrected[best],
        "held_out_block": 1 + best,
        "held_out": inner.tolist(),
    }
    return {
        "knn": plain,
        "knn_standardized": corrected,
        "knn_last": plain[-1],
        "knn_standardized_last": corrected[-1],
        "best_block": 1 + corrected.index(max(corrected)),
        **(chosen_inside if held.any() else {}),
    }


def evaluate_agreement(settings: Agreement, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """`agreement` in percent, `alignment`, `uniformity` and `rank_me` of the test images.

    Raises:
        UserError: fewer training images than `k`, or fewer than two test images.
    """
    train = job.features("train", labelled=False)
    index = open_index(job.path("test"))
    if settings.k > train.n or index.n < 2:
        raise UserError(
            f"{job.out.stem}: {train.n} training and {index.n} test images; {settings.k} and 2 are "
            "needed"
        )
    bank = train.values[_evenly(train.n, settings.bank)]
    index = replace(index, rows=index.rows[_evenly(index.n, settings.images)])
    encoding = Encoding(job.encoder, distributed.device_of(context))
    pairs = _pairs(settings, context, index, encoding)
    check_finite(pairs, job.run)
    shared = shared_neighbors(pairs, bank, settings.k, idle_cpus(context))
    job.notes["test_images"] = index.n
    return {
        "alignment": alignment(pairs),
        "uniformity": uniformity(F.normalize(pairs[0], dim=1)),
        "rank_me": rank_me(pairs[0]),
        "agreement": 100 * float(np.mean(shared)),
        **job.keep_outcomes({"agreement": shared}),
    }


def _pairs(settings: Agreement, context: Context, index: Index, encoding: Encoding) -> Tensor:
    """Return features of two views of each image, float32 [2, n, D]."""
    encoder = encoding.settings
    view = View(crop_scale=settings.crop_scale, flip=settings.flip)
    starts = range(0, index.n, DECODED)
    batches = view_parts(
        index,
        views=(view, view),
        image_size=encoder.image_size,
        seed=settings.seed,
        parts=[range(start, min(start + DECODED, index.n)) for start in starts],
        threads=idle_cpus(context),
    )
    found: list[list[Tensor]] = [[], []]
    for batch in batches:
        for number, features in enumerate(found):
            raw = batch.images[0][number].to(encoding.device)
            given = view, number, settings.seed, batch.epochs, batch.ids, encoder.pixels
            for images in augment(raw, *given).split(encoding.batch_size):
                features.append(encoding(images).cpu())
    return torch.stack([torch.cat(features) for features in found])


def shared_neighbors(
    pairs: Tensor, bank: NDArray[Any], k: int, threads: int = 1
) -> NDArray[np.bool_]:
    """Return whether each neighbour of the first view is one of the second, bool [k, n].

    Args:
        pairs: features of two views, [2, n, D].
        bank: of the images to find neighbours among, by cosine, [m, D].
        k: number of neighbours.
        threads: that search.
    """
    first, second = (nearest(bank, view.numpy(), k, threads=threads)[1] for view in pairs)
    shared: NDArray[np.bool_] = (first[:, :, None] == second[:, None, :]).any(axis=2).T
    return shared


def _evenly(n: int, most: int) -> NDArray[np.int64]:
    """Return the numbers of at most `most` of n images, evenly spaced, int64."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))
