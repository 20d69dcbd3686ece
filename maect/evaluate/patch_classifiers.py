"""Segmentation by classifiers of patches, in the settings of CAPI: k-NN, logistic regression.

k-NN: every test patch takes from its k nearest training patches the most frequent class of each
pixel. Logistic regression: a patch is of the most frequent class of its pixels. Settings are those
of the highest mIoU on held-out training images, which are then added to the training patches.
Features are standardised by the patches that are not held out.
docs/results/paper/probes_beside_their_authors.csv compares settings with eval_segmentation.py.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.index import open_index
from maect.data.subsets import held_out_mask
from maect.evaluate.base import (
    EvaluationJob,
    encoder_checksum,
    idle_cpus,
)
from maect.evaluate.dense import MaskSplit, encode_patches, miou
from maect.evaluate.features import Encoding
from maect.evaluate.knn import nearest
from maect.evaluate.protocols.probes import PatchClassifier, PatchKnn, PatchLogistic
from maect.evaluate.store import Array, moments, standardize

Known: TypeAlias = tuple[Array, NDArray[np.uint8]]
Choices: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Patches:
    """Patch tokens of images and the classes of their pixels.

    Attributes:
        features: float32 [images, N, D].
        classes: uint8 [images, N, p], p pixels of each patch.
    """

    features: Array
    classes: NDArray[np.uint8]

    def of(self, images: NDArray[np.bool_]) -> "Patches":
        """Return the patches of some images."""
        return Patches(self.features[images], self.classes[images])

    def rows(self) -> Array:
        """Return features of all patches, [images * N, D]."""
        return self.features.reshape(-1, self.features.shape[2])

    def pixels(self) -> NDArray[np.uint8]:
        """Return classes of all patches' pixels, [images * N, p]."""
        return self.classes.reshape(-1, self.classes.shape[2])


def encode_splits(
    settings: PatchClassifier, context: Context, job: EvaluationJob
) -> dict[str, Patches] | None:
    """Encode and standardise training, held-out and test patches.

    Returns:
        The patches of each; None on other ranks than 0, which are done.
    """
    encoding = Encoding(job.encoder, distributed.device_of(context), settings.precision)
    found = {}
    with distributed.process_group(context):
        for split in ("train", "test"):
            index = open_index(job.path(split))
            index.check_channels(encoding.settings.pixels.channels)
            masks = MaskSplit(index, open_index(job.path(f"{split}_masks")))
            features = encode_patches(context, index, encoding)
            found[split] = features, masks
    if context.rank:
        return None
    images = found["train"][1].images
    held = held_out_mask(images, max(1, images.n // settings.one_in), settings.seed)
    if not held.any() or held.all():
        raise UserError(f"{job.path('train')}: needs two images or more, to hold one out")
    threads = idle_cpus(context)
    size = encoding.settings.image_size
    parts = {}
    for split, (features, masks) in found.items():
        if not np.isfinite(features).all():
            raise UserError(f"{job.run}: the features are not finite; the encoder diverged")
        classes = masks.patches(size, features.shape[1], threads)
        parts[split] = Patches(features, classes)
    train = parts["train"]
    parts["held"], parts["train"] = train.of(held), train.of(~held)
    scale = moments(parts["train"].rows())
    return {
        name: Patches(standardize(part.features, scale), part.classes)
        for name, part in parts.items()
    }


def training_patches(settings: PatchClassifier, *parts: Patches) -> Known:
    """Return features [n, D] and classes of pixels [n, p] of patches to learn from.

    Left out are patches whose most frequent number is ignored.
    """
    features = np.concatenate([part.rows() for part in parts])[:: settings.patches_one_in]
    classes = np.concatenate([part.pixels() for part in parts])[:: settings.patches_one_in]
    kept = ~np.isin(most_frequent(classes), settings.ignore)
    if not kept.any():
        raise UserError(f"all masks hold only the numbers {[*settings.ignore]}, which are ignored")
    return features[kept], classes[kept]


def evaluate_knn(settings: PatchKnn, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Choose a number of neighbours and a distance; see `choose_and_score`."""
    choices = [{"k": k, "distance": d} for d in settings.distances for k in settings.neighbours]
    return choose_and_score(settings, context, job, choices, predict_by_neighbours)


def evaluate_logistic(
    settings: PatchLogistic, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Choose a penalty; see `choose_and_score`."""
    choices = [{"c": c} for c in settings.penalties]
    return choose_and_score(settings, context, job, choices, predict_by_regression)


def choose_and_score(
    settings: PatchClassifier,
    context: Context,
    job: EvaluationJob,
    choices: Choices,
    predict: Callable[[Any, Known, Array, Choices, int], list[NDArray[np.uint8]]],
) -> dict[str, Any]:
    """Return mIoU in percent under the protocol's name, and the choice of the held-out images.

    A killed job does not choose again. docs/reference/dense.md lists the metrics.

    Args:
        predict: the class of each pixel of patches, uint8 [q, p], by each of some choices; given
            the training patches of `training_patches`, and the features of others, float32 [q, D].
    """
    parts = encode_splits(settings, context, job)
    if parts is None:
        return {}
    train, held, test = parts["train"], parts["held"], parts["test"]
    threads = idle_cpus(context)

    def tried() -> list[dict[str, Any]]:
        known = training_patches(settings, train)
        found = predict(settings, known, held.rows(), choices, threads)
        scores = [miou(held.pixels(), classes, settings.ignore)[0] for classes in found]
        return [{**one, "miou": score} for one, score in zip(choices, scores, strict=True)]

    read = [open_index(job.path(name)).digest for name in settings.inputs()]
    held_out = job.compute_once(context, digest(settings, encoder_checksum(job.run), read), tried)
    best = max(held_out, key=itemgetter("miou"))  # of equal ones the first
    chosen = choices[held_out.index(best)]
    known = training_patches(settings, train, held)
    (classes,) = predict(settings, known, test.rows(), [chosen], threads)
    mean, each, accuracy = miou(test.pixels(), classes, settings.ignore)
    name = settings.name
    own = {name: mean, f"{name}_accuracy": accuracy, f"{name}_classes": each}
    return own | chosen | {"held_out": held_out}


def most_frequent(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the most frequent number of each row, [n, p] to [n]; ties: the smallest."""
    return torch.from_numpy(classes).mode(dim=1).values.numpy()


_AT_ONCE = 4096


def predict_by_neighbours(
    settings: PatchKnn, known: Known, queries: Array, choices: Choices, threads: int
) -> list[NDArray[np.uint8]]:
    """Return the most frequent class of each pixel among k neighbours; ties: the smallest."""
    features, classes = known
    table = torch.from_numpy(classes)
    most = max(settings.neighbours)
    if len(features) < most:
        raise UserError(
            f"{settings.train_split}: {len(features)} patches, fewer than {most} neighbours; give "
            "more images or fewer `neighbours`"
        )
    out = [np.empty((len(queries), classes.shape[1]), np.uint8) for _ in choices]
    for distance in dict.fromkeys(choice["distance"] for choice in choices):
        _, ids = nearest(features, queries, most, None, threads, distance)
        for start in range(0, len(ids), _AT_ONCE):
            found = table[torch.from_numpy(ids[start : start + _AT_ONCE])]  # [b, k, p]
            for choice, votes in zip(choices, out, strict=True):
                if choice["distance"] == distance:
                    mode = found[:, : choice["k"]].mode(dim=1).values
                    votes[start : start + _AT_ONCE] = mode.numpy()
    return out


def predict_by_regression(
    settings: PatchLogistic, known: Known, queries: Array, choices: Choices, threads: int
) -> list[NDArray[np.uint8]]:
    """Return a patch's class for each of its pixels."""
    features, classes = known
    labels = most_frequent(classes)
    shape = (len(queries), classes.shape[1])
    if len(np.unique(labels)) < 2:
        raise UserError(f"{settings.train_masks}: patches of one class only")

    known_64, queries_64 = features.astype(np.float64), queries.astype(np.float64)

    def fitted(choice: dict[str, Any]) -> NDArray[np.uint8]:
        model = LogisticRegression(
            C=choice["c"], max_iter=settings.max_iterations, tol=settings.tolerance
        )
        found = model.fit(known_64, labels).predict(queries_64)
        return np.broadcast_to(found.astype(np.uint8)[:, None], shape)

    with threadpool_limits(1), warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")  # a weak penalty may not converge, nor need to
        return list(pool.map(fitted, choices))
