"""A finished run of fine-tuning: its encoder and classifier on images."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maect.core.context import Context
from maect.core.distributed import share_of, sum_scalars
from maect.core.errors import UserError
from maect.core.files import checked_sha256, read_json
from maect.data.index import Index
from maect.data.loader import evaluation_batches
from maect.data.transforms import normalize
from maect.evaluate.features import BATCH
from maect.models.vit import mixed_precision
from maect.models.weights import load_encoder_weights, load_tensors
from maect.stages.fine_tune import FineTune


class FineTuned:
    """Encoder and classifier as their run left them."""

    def __init__(
        self, folder: Path, stage: FineTune, seed: int, test: Index, device: torch.device
    ) -> None:
        """Load a run.

        Args:
            folder: of the run.
            stage: what it must have been trained with.
            seed: likewise.
            test: the images that it will be scored on.
            device: where to run it.

        Raises:
            UserError: it is not finished, was trained otherwise or is damaged, or it tells other
                classes apart.
        """
        self.record, self.stage, self.device = read_json(folder / "run.json"), stage, device
        if (self.record["recipe"], self.record["seed"]) != (stage.model_dump(mode="json"), seed):
            raise UserError(f"{folder}: was trained with other settings than this evaluation asks")
        for name in self.record["sha256"]:
            checked_sha256(folder / name)
        encoder, _, self.pooling = load_encoder_weights(folder / "encoder.safetensors")
        classifier, metadata = load_tensors(folder / "head.safetensors")
        if tuple(json.loads(metadata["classes"])) != test.class_names:
            raise UserError(f"{folder} and {test.directory}: their classes differ")
        self.weights = _as_trained(encoder.state_dict(), classifier)
        self.encoder = encoder.to(device)
        self.classifier = {name: value.to(device) for name, value in classifier.items()}

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Tensor:
        """Class of each normalized image [b, 3, S, S], int64 [b]."""
        with mixed_precision(images.device, self.stage.precision):
            tokens = self.encoder(images)
        features = self.encoder.pool(tokens.float(), self.pooling)
        return F.linear(features, **self.classifier).argmax(dim=1)

    def accuracy(self, context: Context, test: Index, resize: int | None) -> float:
        """Of a split, in percent; every rank scores its share."""
        size, threads, hits = self.encoder.settings.image_size, max(1, context.cpus), 0
        for images, labels, _ in evaluation_batches(
            test,
            image_size=size,
            resize=resize,
            rows=share_of(context, test.n, BATCH),
            batch_size=BATCH,
            threads=threads,
        ):
            predicted = self.predict(normalize(images.to(self.device, non_blocking=True)))
            hits += int((predicted.cpu() == torch.from_numpy(labels)).sum())
        return 100 * sum_scalars([float(hits)], self.device)[0] / test.n

    def result(self, context: Context, test: Index, resize: int | None) -> dict[str, Any]:
        """Accuracy, losses of the epochs, the labelled images, and sha256 of the weights."""
        hashed = hashlib.sha256()
        for name, value in sorted(self.weights.items()):
            hashed.update(name.encode())
            hashed.update(value.contiguous().numpy().data)
        return {
            "accuracy": self.accuracy(context, test, resize),
            "losses": self.record["losses"],
            "subset": self.record["subset"],
            "weights_sha256": hashed.hexdigest(),
        }


def _as_trained(encoder: dict[str, Tensor], classifier: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights under the names that they have in training."""
    named = {n if n.startswith("fc_norm.") else f"encoder.{n}": v for n, v in encoder.items()}
    return named | {f"head.{name}": value for name, value in classifier.items()}
