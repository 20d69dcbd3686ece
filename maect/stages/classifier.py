"""Fine-tuning as a module: from a batch of labelled images to a loss."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.data.loader import Batch
from maect.data.random import drop_path_factors
from maect.data.transforms import (
    apply_mix,
    augment,
    draw_mix,
    erase,
    normalize,
    partners,
)
from maect.models.kernels import mixed_precision
from maect.models.vit import Pooling, VisionEncoder, seeded
from maect.stages.base import Supervised
from maect.train.objective import Objective
from maect.train.passes import Passes

HEAD_STD = 2e-5
"""Standard deviation of the classifier's initial weights, as in MAE."""


@dataclass
class Examples:
    """One rank's part of a batch, on the device.

    Attributes:
        images: augmented, normalized and mixed, float32 [b, C, S, S].
        labels: of the images before mixing, int64 [b].
        share: weight of the image's own label, 0 to 1; the rest is its partner's.
        kept: factors on the residual branches, float32 [2 * depth, b]; None keeps all.
    """

    images: Tensor
    labels: Tensor
    share: float
    kept: Tensor | None


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016) whose factors are drawn elsewhere.

    Attributes:
        factor: 0 or 1 / (1 - rate) for each sample, [b]; None: nothing is dropped.
    """

    factor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Scale the rows of a residual branch [b, N, D]."""
        return x if self.factor is None else x * self.factor[:, None, None]


class Classifier(Objective):
    """Cross-entropy of a linear classifier on the pooled encoder."""

    passes: Passes

    def __init__(
        self, stage: Supervised, encoder: VisionEncoder, classes: int, pooling: Pooling, seed: int
    ) -> None:
        """Put a new classifier on an encoder.

        Args:
            encoder: changed in place: frozen blocks, drop path, and no final norm for `fc_norm`.
            pooling: what the encoder's file says, for `pooling: encoder`.
            seed: of the classifier's weights and of everything drawn.

        Raises:
            UserError: no [CLS] token to pool.
        """
        super().__init__()
        width = encoder.settings.width
        encoder.requires_grad_(True).freeze(stage.frozen_blocks)
        self.stage = stage
        self.seed = seed
        self.pooling: Pooling = pooling if stage.pooling == "encoder" else stage.pooling
        if self.pooling == "cls" and not encoder.settings.class_token:
            raise UserError("pooling cls: this encoder has no [CLS] token; set pooling=mean")
        self.fc_norm: nn.Module = nn.Identity()
        if self.pooling == "fc_norm":
            encoder.norm = nn.Identity()
            self.fc_norm = nn.LayerNorm(width, eps=1e-6)
        self.encoder = encoder
        self.drop_paths: list[DropPath] = []
        if stage.drop_path:
            for block in encoder.blocks:
                block.drop_path1 = DropPath()  # behind attention
                block.drop_path2 = DropPath()  # behind the MLP
                self.drop_paths += [block.drop_path1, block.drop_path2]
        with seeded(seed):
            self.head = nn.Linear(width, classes)
            nn.init.trunc_normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)
        self.passes = Passes(self.compute, [encoder, self.fc_norm, self.head])

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the factors on the residual branches, `kept` of `Examples`."""
        if not self.stage.drop_path:
            return {}
        rates = np.array(drop_rates(self.stage, self.encoder.settings.depth))
        return {"kept": drop_path_factors(rates, self.seed, epochs, ids)}

    def prepare(self, batch: Batch, device: torch.device) -> Examples:
        """Flip, erase and mix the images of a batch."""
        stage, seed, ids, epochs = self.stage, self.seed, batch.ids, batch.epochs
        (view,) = stage.view_settings()
        (cropped,), values = batch.to(device, self.draw)
        images = augment(cropped[0], view, 0, seed, epochs, ids, self.encoder.settings.pixels)
        erase(images, stage.random_erasing, seed, epochs, ids)
        mix = draw_mix(stage.mixup, stage.cutmix, images.shape[-1], seed, batch.step)
        kept = values.get("kept")
        return Examples(apply_mix(images, mix), values["labels"], mix.share, kept)

    def compute(self, images: Tensor, kept: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute logits, float32 [b, classes], of images and factors as in `Examples`."""
        for number, drop_path in enumerate(self.drop_paths):
            drop_path.factor = None if kept is None else kept[number]
        return (self.logits(images),)

    def inputs_of_passes(self, inputs: Examples) -> list[tuple[Tensor, ...]]:
        """Return the images, and the factors on residual branches if any are dropped."""
        return [(inputs.images,) if inputs.kept is None else (inputs.images, inputs.kept)]

    def forward(self, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy with smoothed, mixed labels, [], and nothing to log."""
        (tensors,) = self.inputs_of_passes(batch)
        (logits,) = self.passes(*tensors)
        smoothing = self.stage.label_smoothing
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
        if batch.share < 1:
            # Linear in the labels: what timm's soft targets give.
            other = F.cross_entropy(logits, partners(batch.labels), label_smoothing=smoothing)
            loss = batch.share * loss + (1 - batch.share) * other
        return loss, {}

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the class of each image, uint8 [b, C, S, S]: int64 [b]."""
        for drop_path in self.drop_paths:
            drop_path.factor = None
        return self.logits(normalize(images, self.encoder.settings.pixels)).argmax(dim=1)

    def logits(self, images: Tensor) -> Tensor:
        """Return logits, float32 [b, classes], of normalized images [b, C, S, S]."""
        pooled = self._pooled(self.encoder, self.fc_norm, images)
        with torch.autocast(images.device.type, enabled=False):
            logits: Tensor = self.head(pooled)
        return logits

    def parts_read(self) -> dict[str, nn.Module]:
        """Return the encoder and the norm after pooling."""
        return {"encoder": self.encoder, "fc_norm": self.fc_norm}

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """Return the classifier's inputs, [b, D], of normalized images."""
        return self._pooled(cast(VisionEncoder, parts["encoder"]), parts["fc_norm"], images)

    def _pooled(self, encoder: VisionEncoder, norm: nn.Module, images: Tensor) -> Tensor:
        how = "mean" if self.pooling == "fc_norm" else self.pooling
        with mixed_precision(images.device, self.stage.precision):
            tokens = encoder(images).tokens
        with torch.autocast(images.device.type, enabled=False):
            pooled: Tensor = norm(encoder.pool(tokens.float(), how))
        return pooled


def drop_rates(stage: Supervised, depth: int) -> list[float]:
    """Return the probability of dropping each residual branch, [2 * depth], two of each block."""
    if stage.drop_path_schedule == "constant":
        rates = [stage.drop_path] * depth
    else:
        rates = [stage.drop_path * block / max(depth - 1, 1) for block in range(depth)]
    return [rate for rate in rates for _ in range(2)]
