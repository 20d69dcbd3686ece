"""The classifier that a linear probe left, applied to other images."""

import json
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.index import Index
from maect.data.loader import evaluation_batches
from maect.evaluate.encoding import Encoding
from maect.evaluate.features import BATCH
from maect.evaluate.heads import BN_EPS
from maect.evaluate.job import Job
from maect.models.vit import Precision
from maect.models.weights import load_tensors


class Classifier:
    """Encoder and linear probe as a function from images to logits.

    Attributes:
        class_names: of the data that the probe was trained on.
    """

    def __init__(self, job: Job, device: torch.device, precision: Precision) -> None:
        """Load the run's encoder and the probe of the job.

        Raises:
            UserError: no probe, not one of a single representation, or one of another encoder.
        """
        path, encoder = job.path("probe"), job.run / "encoder.safetensors"
        tensors, texts = load_tensors(path)
        if not {"weight", "bias", "mean", "var"} <= tensors.keys() or "class_names" not in texts:
            raise UserError(f"{path}: holds no single linear probe; evaluate linear_probe again")
        self.encoding = Encoding(encoder, device, precision)
        if texts.get("encoder_sha256") != sha256_file(encoder):
            raise UserError(f"{path}: trained on another encoder than {encoder}; probe it again")
        self.class_names = tuple(json.loads(texts["class_names"]))
        scale = torch.rsqrt(tensors["var"] + BN_EPS)
        # BatchNorm is affine in the features: it becomes part of the linear layer.
        self.weight = (tensors["weight"] * scale).to(device)
        self.bias = (tensors["bias"] - tensors["weight"] @ (tensors["mean"] * scale)).to(device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 [b, classes] of images, uint8 [b, 3, S, S] or normalized float32.

        Raises:
            UserError: logits that are not finite.
        """
        logits = torch.addmm(self.bias, self.encoding(images), self.weight.T)
        if not torch.isfinite(logits).all():
            raise UserError(
                "the probe's predictions are not finite; the encoder diverged or its weights "
                "are damaged"
            )
        return logits

    def check(self, index: Index) -> None:
        """Refuse images that the probe cannot be scored on.

        Raises:
            UserError: no images, unlabelled ones, or other classes.
        """
        if index.n == 0:
            raise UserError(f"{index.directory}: holds no images")
        if index.labels.min() < 0:
            raise UserError(f"{index.directory}: some images have no label")
        if tuple(index.class_names) != self.class_names:
            raise UserError(
                f"{index.directory}: its classes are not those that the probe was trained on"
            )

    def shares(
        self, context: Context, job: Job, index: Index
    ) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
        """This rank's images uint8 [b, 3, S, S] on the device, labels [b] and ids [b]."""
        for images, labels, ids in evaluation_batches(
            index,
            image_size=self.encoding.settings.image_size,
            resize=job.resize,
            rows=distributed.share_of(context, index.n, BATCH),
            batch_size=BATCH,
            threads=context.cpus,
        ):
            yield images.to(self.encoding.device, non_blocking=True), labels, ids
