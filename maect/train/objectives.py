"""The stages as modules: from prepared views to a loss. DeepSpeed wraps one of them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from maect.models.decoder import Decoder, reconstruction_loss
from maect.models.heads import NNCLRHead
from maect.models.precision import Precision, mixed_precision
from maect.models.vit import VisionEncoder
from maect.recipes import visible_patches


@dataclass
class Views:
    """One rank's part of a batch, on the device.

    Attributes:
        images: augmented and normalized, float32 [views, b, 3, S, S].
        order: patch numbers of each view with the visible ones first, int64 [views, b, L].
        ids, labels: int64 [b]; labels are -1 where unknown.
        dice: which of the k nearest neighbours to take, int64 [views, b].
    """

    images: Tensor
    order: Tensor | None
    ids: Tensor
    labels: Tensor
    dice: Tensor | None


class Objective(nn.Module):
    """Base: mixed precision, and what every stage returns.

    `forward` gives the loss, a mean over this rank's samples, and detached scalars to log.
    """

    def __init__(self, precision: Precision, mask_ratio: float) -> None:
        super().__init__()
        self.precision = precision
        self.mask_ratio = mask_ratio

    def autocast(self, device: torch.device) -> torch.autocast:
        """bfloat16 for matrix products; parameters stay in float32."""
        return mixed_precision(device, self.precision)

    def visible(self, patches: int) -> int:
        """How many patches the encoder sees."""
        return visible_patches(patches, self.mask_ratio)


def flat(x: Tensor) -> Tensor:
    """[views, b, ...] to [views * b, ...]."""
    return x.flatten(0, 1)


class MaskedAutoencoder(Objective):
    """MAE pre-training, with an NNCLR head beside the decoder if one is given.

    With `detached` the head learns without changing the encoder and its loss needs no weight;
    otherwise the loss is MAE + weight * NNCLR (paper, section 4.4).
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        decoder: Decoder,
        *,
        mask_ratio: float,
        normalize_pixels: bool,
        precision: Precision,
        head: NNCLRHead | None = None,
        pooling: Literal["cls", "mean"] = "cls",
        detached: bool = False,
        weight: float = 0.001,
    ) -> None:
        super().__init__(precision, mask_ratio)
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.normalize_pixels, self.pooling = normalize_pixels, pooling
        self.detached, self.weight = detached, weight

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """MAE's loss over all views, [] and scalars to log."""
        assert views.order is not None
        images, order = flat(views.images), flat(views.order)
        visible = self.visible(order.shape[1])
        with self.autocast(images.device):
            tokens = self.encoder(images, order[:, :visible])
            prediction = self.decoder(tokens, order)
            loss = reconstruction_loss(prediction, images, order, visible, self.normalize_pixels)
            if self.head is None:
                return loss, {}
            features = self.encoder.pool(tokens, self.pooling).unflatten(0, views.images.shape[:2])
            features = features.detach() if self.detached else features
            out = self.head(features, views.ids, views.labels, views.dice)
        total = loss + (1.0 if self.detached else self.weight) * out.loss
        parts = {"loss_mae": loss.detach(), "loss_nnclr": out.loss.detach()}
        return total, parts | out.metrics


class ContrastiveObjective(Objective):
    """The NNCLR loss on top of the encoder: head initialisation and contrastive tuning.

    With `train_encoder=False` the whole encoder is frozen and no graph of it is built.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        head: NNCLRHead,
        *,
        pooling: Literal["cls", "mean"],
        precision: Precision,
        mask_ratio: float = 0.0,
        train_encoder: bool = True,
    ) -> None:
        super().__init__(precision, mask_ratio)
        self.encoder, self.head = encoder, head
        self.pooling, self.train_encoder = pooling, train_encoder
        if not train_encoder:
            encoder.requires_grad_(False).eval()

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """The symmetrised NNCLR loss, [] and scalars to log."""
        images = flat(views.images)
        kept = None
        if views.order is not None:
            order = flat(views.order)
            kept = order[:, : self.visible(order.shape[1])]
        with self.autocast(images.device):
            with torch.set_grad_enabled(self.train_encoder and torch.is_grad_enabled()):
                tokens = self.encoder(images, kept)
            features = self.encoder.pool(tokens, self.pooling).unflatten(0, views.images.shape[:2])
            out = self.head(features, views.ids, views.labels, views.dice)
        return out.loss, out.metrics
