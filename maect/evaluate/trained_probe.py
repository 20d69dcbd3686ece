"""The trained linear probe on other images: shifted data, rotations and changed colours.

`Robustness` (paper, section 5 and table 5) is its accuracy on shifted sets. A set that has only
some of the classes (ImageNet-R and -A have 200) is scored among those: the other logits do not take
part, as in the authors' code. `EffectiveInvariance` (paper, table 15; Deng et al. 2022) is 0 where
the prediction of the changed image differs, otherwise a geometric mean of both probabilities. The
authors' code takes the root of the sum of products over all classes, the paper's text that of the
predicted class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.index import Index, open_index
from maect.evaluate.base import Encodes, EvaluationJob, ImageCount, Input, OutputOf, Shards
from maect.recipes import Pixels

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from maect.models.precision import Precision


def affine(
    tensors: Mapping[str, Tensor], texts: Mapping[str, str], path: Path
) -> tuple[Tensor, Tensor]:
    """Return a linear probe as one layer on features: weight [classes, width] and bias [classes].

    Refuses, by a UserError, what is no probe or not one of a single representation.
    """
    import torch

    from maect.evaluate.stacked_heads import BN_EPS

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
        from maect.evaluate.encoding import Encoding
        from maect.models.weights import load_tensors

        path = job.path("probe")
        encoder = job.run / "encoder.safetensors"
        tensors, texts = load_tensors(path)
        weight, bias = affine(tensors, texts, path)
        self.encoding = Encoding(encoder, device, precision)
        if texts["encoder_sha256"] != sha256_file(encoder):
            raise UserError(f"{path}: trained on another encoder than {encoder}; probe it again")
        self.class_names = tuple(json.loads(texts["class_names"]))
        self.weight, self.bias = weight.to(device), bias.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 [b, classes], if finite, of images uint8 [b, C, S, S] or normalized."""
        import torch

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


class Robustness(Encodes):
    """The trained linear probe on shifted data (paper, table 5)."""

    name: ClassVar[str] = "robustness"
    title: ClassVar[str] = "linear probe on shifted data"
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the unshifted test split; of a shifted "
        "split only the classes among its labels can be predicted"
    )

    splits: tuple[str, ...] = (
        "imagenet_v2_threshold",
        "imagenet_v2_matched",
        "imagenet_v2_top",
        "imagenet_r",
        "imagenet_sketch",
        "imagenet_a",
    )
    """Splits of the evaluated dataset; each gives a metric of its name."""
    probe: str = "linear_probe"
    """Which evaluation's probe."""

    def inputs(self) -> Mapping[str, Input]:
        """Return the probe, and the images of every split by its name."""
        return {"probe": OutputOf(self.probe)} | {name: Shards(name) for name in self.splits}

    def encoded(self, images: ImageCount) -> float:
        """Count every image once."""
        return sum(map(images, self.splits))

    def headline(self) -> dict[str, str]:
        """Accuracy on each set of images."""
        return {name: f"{self.title}: {name}" for name in self.splits}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracy in percent on each of `splits`, by its name; and how many classes it has."""
        import numpy as np
        import torch

        from maect.core import distributed
        from maect.train.scores import accuracy

        probe = TrainedProbe(job, distributed.device_of(context), self.precision)
        indexes = {name: open_index(job.path(name)) for name in self.splits}
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


class EffectiveInvariance(Encodes):
    """Change of the probe's prediction by rotations and changed colours (paper, table 15)."""

    name: ClassVar[str] = "effective_invariance"
    title: ClassVar[str] = "effective invariance"
    labelled: ClassVar[bool] = False
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the test split"
    )

    probe: str = "linear_probe"
    """Which evaluation's probe."""
    draws: int = Field(default=3, gt=0)
    """Random colour changes of each image; rotations are three."""
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """Return the probe and the test images."""
        return {"probe": OutputOf(self.probe), "test": Shards(self.test_split)}

    def encoded(self, images: ImageCount) -> float:
        """Count every test image as it is, turned three times and recoloured."""
        return images(self.test_split) * (4 + self.draws)

    def headline(self) -> dict[str, str]:
        """Invariance to each change."""
        return {f"ei_{change}": f"{self.title} to {change}" for change in CHANGES}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Means over the test images and changes, 0 to 1; `agreement_…` in percent.

        docs/reference/probes.md lists the metrics.
        """
        import torch

        from maect.core import distributed
        from maect.train.scores import share

        index = open_index(job.path("test"))
        index.check_channels(3)  # it changes colours
        probe = TrainedProbe(job, distributed.device_of(context), self.precision)
        probe.check(index)
        pixels = probe.encoding.settings.pixels
        # Rows: rotation, colour. Columns: code's formula, paper's formula, agreement, images.
        sums = torch.zeros(2, 4, dtype=torch.float64)
        with distributed.process_group(context):
            size = probe.encoding.settings.image_size
            device = probe.encoding.device
            for images, _, ids in share(context, index, device, size, job.resize):
                plain = probe(images)
                for change, changed in _changed(images, ids, pixels, self):
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


CHANGES = ("rotation", "color")


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
    import numpy as np

    from maect.data import random
    from maect.data.transforms import jitter, normalize

    for quarter in (1, 2, 3):
        yield "rotation", images.rot90(quarter, (2, 3))
    everyone = np.ones(len(ids), bool)
    for draw in range(settings.draws):
        u = random.uniform(settings.seed, draw, ids, 0, random.COLOR, 8)
        colored = jitter(images.float() / 255, everyone, u[:, :4], u[:, 4:])
        yield "color", normalize(colored, pixels)
