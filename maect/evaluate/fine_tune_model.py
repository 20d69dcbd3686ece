"""Encoder and linear classifier as an objective of the training engine."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.data.transforms import partners
from maect.evaluate.fine_tune_settings import FineTune
from maect.models.vit import VisionEncoder, seeded
from maect.train.objectives import Objective
from maect.train.parameters import grouped, layer_scale

HEAD_STD = 2e-5  # MAE's


@dataclass
class Examples:
    """One rank's part of a batch, on the device.

    Attributes:
        images: augmented, normalized and mixed, float32 [b, 3, S, S].
        labels: of the images before mixing, int64 [b].
        share: of an image itself in its label; the rest is its partner's.
        kept: factors on the residual branches, float32 [2 * depth, b]; None keeps all.
    """

    images: Tensor
    labels: Tensor
    share: float
    kept: Tensor | None


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016) whose dice are drawn elsewhere.

    Attributes:
        factor: 0 or 1 / (1 - rate) for each sample, [b]; None: nothing is dropped.
    """

    factor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Scale the rows of a residual branch [b, N, D]."""
        return x if self.factor is None else x * self.factor[:, None, None]


class Classifier(Objective):
    """Cross-entropy of a linear classifier on the pooled encoder."""

    def __init__(
        self, encoder: VisionEncoder, classes: int, settings: FineTune, pooling: Any, seed: int
    ) -> None:
        """Put a new head on an encoder.

        Args:
            encoder: changed in place: frozen blocks, drop path, and no final norm for `fc_norm`.
            classes: number of outputs.
            settings: the recipe.
            pooling: what the encoder's file says, for `pooling: encoder`.
            seed: of the head's weights.

        Raises:
            UserError: more frozen blocks than there are, or no [CLS] token to pool.
        """
        super().__init__(settings.precision, 0.0)
        width, depth = encoder.settings.width, encoder.settings.depth
        if settings.frozen_blocks > depth:
            raise UserError(f"frozen_blocks {settings.frozen_blocks}: the encoder has {depth}")
        encoder.requires_grad_(True).freeze(settings.frozen_blocks)
        encoder.checkpointing = settings.activation_checkpointing
        self.pooling = pooling if settings.pooling == "encoder" else settings.pooling
        if self.pooling == "cls" and not encoder.settings.class_token:
            raise UserError("pooling cls: this encoder has no [CLS] token; set pooling=mean")
        self.smoothing = settings.label_smoothing
        self.fc_norm: nn.Module = nn.Identity()
        if self.pooling == "fc_norm":
            encoder.norm = nn.Identity()
            self.fc_norm = nn.LayerNorm(width, eps=1e-6)
        self.encoder, self.drop_paths = encoder, []
        if settings.drop_path:
            self.drop_paths = insert_drop_paths(encoder)
        with seeded(seed):
            self.head = nn.Linear(width, classes)
            nn.init.trunc_normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Float32 [b, classes] of normalized images [b, 3, S, S]."""
        how = "mean" if self.pooling == "fc_norm" else self.pooling
        with self.autocast(images.device):
            tokens = self.encoder(images)
        with torch.autocast(images.device.type, enabled=False):
            features = self.encoder.pool(tokens.float(), how)
            return self.head(self.fc_norm(features))

    def forward(self, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy with the smoothed, mixed labels, []."""
        for number, drop_path in enumerate(self.drop_paths):
            drop_path.factor = None if batch.kept is None else batch.kept[number]
        logits = self.logits(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.smoothing)
        if batch.share < 1:
            # Linear in the labels: what timm's soft targets give.
            other = F.cross_entropy(logits, partners(batch.labels), label_smoothing=self.smoothing)
            loss = batch.share * loss + (1 - batch.share) * other
        return loss, {}

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Tensor:
        """Class of each normalized image, int64 [b]; nothing is dropped."""
        for drop_path in self.drop_paths:
            drop_path.factor = None
        return self.logits(images).argmax(dim=1)


def insert_drop_paths(encoder: VisionTransformer) -> list[DropPath]:
    """Put one behind each residual branch: attention and MLP of block 0, of block 1, ..."""
    inserted = []
    for block in encoder.blocks:
        block.drop_path1, block.drop_path2 = DropPath(), DropPath()
        inserted += [block.drop_path1, block.drop_path2]
    return inserted


def drop_rates(settings: FineTune, depth: int) -> list[float]:
    """Probability of dropping each residual branch, [2 * depth]: both of a block have the same."""
    if settings.drop_path_schedule == "constant" or depth == 1:
        rates = [settings.drop_path] * depth
    else:
        rates = [settings.drop_path * block / (depth - 1) for block in range(depth)]
    return [rate for rate in rates for _ in range(2)]


def parameter_groups(model: Classifier, settings: FineTune) -> list[dict[str, Any]]:
    """Groups for AdamW: layer-wise decay in the encoder, the peak itself for norm and head."""
    peak = settings.base_lr * settings.batch_size / 256
    depth = model.encoder.settings.depth

    def rates(name: str) -> tuple[float, float]:
        part, _, inner = name.partition(".")
        scale = layer_scale(inner, depth, settings.layer_decay) if part == "encoder" else 1.0
        return peak * scale, settings.weight_decay

    return grouped(model, rates)
