"""Neighbours of what an encoder gives: of every block's output, and of two views of an image.

`KnnPerBlock` votes as `maect.evaluate.knn` does on the output of every block, from one forward
pass. The best block of a large masked autoencoder is below its last ones, which work for the
decoder (MIM-Refiner, Alkin et al. 2025). Tuning and refinement are to move it to the end.

`Agreement` needs no labels: it asks whether what is found near an image depends on how the image
was cropped. Collapsed features agree, too, so that alignment (Wang and Isola 2020) is reported with
uniformity and RankMe (Garrido et al. 2023).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.data.loader import view_parts
from maect.data.transforms import augment
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.features import Encoding, check_finite
from maect.evaluate.knn import nearest
from maect.evaluate.outcomes import held_out_for
from maect.evaluate.probe_training import check_splits
from maect.evaluate.protocols.encoders import Agreement, KnnPerBlock
from maect.evaluate.store import moments, standardize
from maect.measures import alignment, rank_me, uniformity, vote
from maect.recipes import View
from maect.train.scores import BATCH, encode_share

DECODED = 256
"""Images whose views are decoded together."""


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
        UserError: no more training images to search than `k`, or fewer than two test images.
    """
    train = job.features("train", labelled=False)
    index = open_index(job.path("test"))
    bank = train.values[_evenly(train.n, settings.bank)]
    if settings.k >= len(bank) or index.n < 2:
        raise UserError(
            f"{job.out.stem}: {len(bank)} training images are searched for {index.n}; more "
            f"than {settings.k} and at least 2 are needed"
        )
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
