"""The trained linear probe on other images: shifted data, rotations and changed colours.

`Robustness` (paper, section 5 and table 5) is its accuracy on shifted sets. A set that has only
some of the classes (ImageNet-R and -A have 200) is scored among those: the other logits do not take
part, as in the authors' code. `EffectiveInvariance` (paper, table 15; Deng et al. 2022) is 0 where
the prediction of the changed image differs, otherwise a geometric mean of both probabilities. The
authors' code takes the root of the sum of products over all classes, the paper's text that of the
predicted class.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data import random
from maect.data.index import Index, open_index
from maect.data.transforms import jitter, normalize
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding
from maect.evaluate.linear_probe import BN_EPS
from maect.evaluate.protocols.encoders import EffectiveInvariance, Robustness
from maect.models.kernels import Precision
from maect.models.weights import load_tensors
from maect.recipes import Pixels
from maect.train.scores import accuracy, share

CHANGES = ("rotation", "color")


def affine(
    tensors: Mapping[str, Tensor], texts: Mapping[str, str], path: Path
) -> tuple[Tensor, Tensor]:
    """Return a linear probe as one layer on features: weight [classes, width] and bias [classes].

    Refuses, by a UserError, what is no probe or not one of a single representation.
    """
    needed = {"weight", "bias", "mean", "var", "class_names", "encoder_sha256", "resize"}
    if not needed <= tensors.keys() | texts.keys():
        raise UserError(
            f"{path}: no linear probe of one representation, with the resize of its images; "
            "evaluate linear_probe again"
        )
    scale = torch.rsqrt(tensors["var"] + BN_EPS)
    # BatchNorm is affine in the features: it becomes part of the linear layer.
    weight = tensors["weight"] * scale
    return weight, tensors["bias"] - tensors["weight"] @ (tensors["mean"] * scale)


class TrainedProbe:
    """The linear probe that an evaluation left, on its encoder: from images to logits."""

    def __init__(self, job: EvaluationJob, device: torch.device, precision: Precision) -> None:
        """Load the run's encoder and the probe of the job, which is refused if it is of another."""
        path = job.path("probe")
        encoder = job.encoder
        tensors, texts = load_tensors(path)
        weight, bias = affine(tensors, texts, path)
        self.encoding = Encoding(encoder, device, precision)
        if texts["encoder_sha256"] != sha256_file(encoder):
            raise UserError(f"{path}: trained on another encoder than {encoder}; probe it again")
        self.class_names = tuple(json.loads(texts["class_names"]))
        self.weight, self.bias = weight.to(device), bias.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 [b, classes], if finite, of images uint8 [b, C, S, S] or normalized."""
        with torch.inference_mode():
            logits = torch.addmm(self.bias, self.encoding(images), self.weight.T)
        if not torch.isfinite(logits).all():
            raise UserError(
                "the probe's predictions are not finite; the encoder diverged or its weights "
                "are damaged"
            )
        return logits

    def check(self, index: Index) -> None:
        """Raise UserError for images that are missing, unlabelled or of other classes."""
        if index.n == 0:
            raise UserError(f"{index.directory}: holds no images")
        if index.labels.min() < 0:
            raise UserError(f"{index.directory}: some images have no label")
        if tuple(index.class_names) != self.class_names:
            raise UserError(
                f"{index.directory}: its classes are not those that the probe was trained on"
            )


def evaluate_robustness(
    settings: Robustness, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Accuracy in percent on each of `splits`, by its name; and how many classes it has."""
    probe = TrainedProbe(job, distributed.device_of(context), settings.precision)
    indexes = {name: open_index(job.path(name)) for name in settings.splits}
    for index in indexes.values():
        probe.check(index)
    classes = {name: np.unique(index.labels) for name, index in indexes.items()}
    single = [name for name, labels in classes.items() if len(labels) < 2]
    if single:
        raise UserError(
            f"{indexes[single[0]].directory}: images of one class, which any probe finds"
        )
    device = probe.encoding.device
    size = probe.encoding.settings.image_size
    accuracies = {}
    with distributed.process_group(context):
        for name, index in indexes.items():
            known = torch.from_numpy(classes[name]).to(device)

            def predict(images: torch.Tensor, known: torch.Tensor = known) -> torch.Tensor:
                return known[probe(images)[:, known].argmax(dim=1)]

            accuracies[name] = accuracy(context, index, device, size, job.resize, predict)
    return {**accuracies, "classes": {name: len(labels) for name, labels in classes.items()}}


def evaluate_invariance(
    settings: EffectiveInvariance, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Means over the test images and changes, 0 to 1; `agreement_…` in percent.

    docs/reference/probes.md lists the metrics.
    """
    index = open_index(job.path("test"))
    index.check_channels(3)  # it changes colours
    probe = TrainedProbe(job, distributed.device_of(context), settings.precision)
    probe.check(index)
    pixels = probe.encoding.settings.pixels
    # Rows: rotation, colour. Columns: code's formula, paper's formula, agreement, images.
    sums = torch.zeros(2, 4, dtype=torch.float64)
    with distributed.process_group(context):
        size = probe.encoding.settings.image_size
        device = probe.encoding.device
        for images, _, ids in share(context, index, device, size, job.resize):
            plain = probe(images)
            for change, changed in _changed(images, ids, pixels, settings):
                values = invariance(plain, probe(changed))
                sums[CHANGES.index(change), :3] += torch.stack(values).double().sum(dim=1).cpu()
                sums[CHANGES.index(change), 3] += len(images)
        distributed.sum_over_ranks(sums)
    metrics = {}
    for change, (code, paper, agreement, images) in zip(CHANGES, sums.tolist(), strict=True):
        metrics[f"ei_{change}"] = code / images
        metrics[f"ei_{change}_paper"] = paper / images
        metrics[f"agreement_{change}"] = 100 * agreement / images
    return metrics


def invariance(plain: Tensor, changed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Effective invariance of each sample, from logits [b, C] before and after a change.

    Returns:
        By the authors' code, by the paper's text, and whether the predictions agree; float [b].
    """
    p, q = plain.softmax(dim=1), changed.softmax(dim=1)
    (top_p, class_p), (top_q, class_q) = p.max(dim=1), q.max(dim=1)
    agree = (class_p == class_q).to(p.dtype)
    return (p * q).sum(dim=1).sqrt() * agree, (top_p * top_q).sqrt() * agree, agree


def _changed(
    images: Tensor, ids: NDArray[np.int64], pixels: Pixels, settings: EffectiveInvariance
) -> Iterator[tuple[str, Tensor]]:
    for quarter in (1, 2, 3):
        yield "rotation", images.rot90(quarter, (2, 3))
    everyone = np.ones(len(ids), bool)
    for draw in range(settings.draws):
        u = random.uniform(settings.seed, draw, ids, 0, random.COLOR, 8)
        colored = jitter(images.float() / 255, everyone, u[:, :4], u[:, 4:])
        yield "color", normalize(colored, pixels)
