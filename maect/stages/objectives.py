"""The self-supervised stages as modules: from a batch of views to a loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maect.data.draws import ids_shuffle, lookup_numbers
from maect.data.loader import Batch
from maect.data.transforms import augment
from maect.models.decoder import Decoder, reconstruction_loss
from maect.models.heads import NNCLRHead
from maect.models.precision import mixed_precision
from maect.models.vit import VisionEncoder
from maect.recipes import visible_patches
from maect.stages.base import SelfSupervised
from maect.stages.collapse import collapse, effective_rank, newest, uniformity
from maect.stages.pretrain import Pretrain
from maect.train.objective import Gathered, Objective


@dataclass
class Views:
    """One rank's part of a batch, on the device.

    Attributes:
        images: augmented and normalized, float32 [views, b, 3, S, S].
        ids_shuffle: patch numbers of each view, the visible ones first, int64 [views, b, L].
        ids, labels: int64 [b]; labels are -1 where unknown.
        neighbors: which of the k nearest neighbours to take, int64 [views, b].
    """

    images: Tensor
    ids_shuffle: Tensor | None
    ids: Tensor
    labels: Tensor
    neighbors: Tensor | None


class ViewsObjective(Objective):
    """Base of the objectives on views, with or without an NNCLR head."""

    head: NNCLRHead | None
    """None, unless a subclass sets it."""

    def __init__(self, stage: SelfSupervised, encoder: VisionEncoder, seed: int) -> None:
        """Hold what every such objective has.

        Args:
            stage: the settings.
            encoder: what is trained or read.
            seed: of masks, augmentations and lookups.
        """
        super().__init__()
        self.stage, self.seed, self.view_settings = stage, seed, stage.view_settings()
        self.pooling: Literal["cls", "mean"] = encoder.settings.ct_pooling
        self.encoder, self.head = encoder, None

    def autocast(self, device: torch.device) -> torch.autocast:
        """bfloat16 for matrix products; parameters stay in float32."""
        return mixed_precision(device, self.stage.precision)

    def visible(self, patches: int) -> int:
        """How many patches the encoder sees."""
        return visible_patches(patches, self.stage.mask_ratio)

    def prepare(self, batch: Batch, device: torch.device) -> Views:
        """Augmented views, masks and lookup numbers of a batch."""
        stage, seed, ids, epochs = self.stage, self.seed, batch.ids, batch.epochs
        raw, views = batch.images.to(device, non_blocking=True), self.view_settings
        images = [augment(raw[i], view, i, seed, epochs, ids) for i, view in enumerate(views)]
        shuffle = neighbors = None
        if stage.mask_ratio:
            patches = self.encoder.settings.patches
            shuffle = ids_shuffle(patches, seed, epochs, ids, len(views))
            shuffle = shuffle.to(device, non_blocking=True)
        if stage.head is not None:
            neighbors = lookup_numbers(stage.head.topk, seed, epochs, ids, len(views)).to(device)
        own_ids, labels = torch.from_numpy(ids).to(device), torch.from_numpy(batch.labels)
        return Views(torch.stack(images), shuffle, own_ids, labels.to(device), neighbors)

    def changing_buffers(self) -> list[Tensor]:
        """The head's queue and statistics."""
        return [] if self.head is None else list(self.head.buffers())

    def after_update(self, gathered: Gathered) -> None:
        """Move the EMA projector towards the projector."""
        if self.head is not None and self.head.slow_projector is not None:
            with gathered(self.head.projector):
                self.head.update_ema()

    def health(self, batch_size: int) -> tuple[dict[str, float], str | None]:
        """Spread of the newest vectors of the queue, which is the same on every rank."""
        if self.head is None:
            return {}, None
        vectors = newest(self.head, batch_size)
        spread = {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}
        return spread, collapse(spread)


def flat(x: Tensor) -> Tensor:
    """[views, b, ...] to [views * b, ...]."""
    return x.flatten(0, 1)


class MaskedAutoencoder(ViewsObjective):
    """MAE pre-training, with an NNCLR head beside the decoder if one is given.

    With `detached` the head learns without changing the encoder and its loss needs no weight;
    otherwise the loss is MAE + weight * NNCLR (paper, section 4.4).
    """

    def __init__(
        self,
        stage: Pretrain,
        encoder: VisionEncoder,
        decoder: Decoder,
        head: NNCLRHead | None,
        seed: int,
    ) -> None:
        super().__init__(stage, encoder, seed)
        # In this order: DeepSpeed lays parameters out as modules list them.
        self.decoder, self.head = decoder, head
        self.normalize_pixels = stage.normalize_pixels
        self.detached = stage.contrastive == "detached"
        self.weight = 1.0 if self.detached else stage.contrastive_weight

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """MAE's loss over all views, [] and scalars to log."""
        assert views.ids_shuffle is not None
        images, order = flat(views.images), flat(views.ids_shuffle)
        visible = self.visible(order.shape[1])
        with self.autocast(images.device):
            tokens = self.encoder(images, order[:, :visible])
            prediction = self.decoder(tokens, order)
            loss = reconstruction_loss(prediction, images, order, visible, self.normalize_pixels)
            if self.head is None:
                return loss, {}
            features = self.encoder.pool(tokens, self.pooling).unflatten(0, views.images.shape[:2])
            features = features.detach() if self.detached else features
            out = self.head(features, views.ids, views.labels, views.neighbors)
        total = loss + self.weight * out.loss
        parts = {"loss_mae": loss.detach(), "loss_nnclr": out.loss.detach()}
        return total, parts | out.metrics


class ContrastiveObjective(ViewsObjective):
    """The NNCLR loss on top of the encoder: head initialisation and contrastive tuning.

    With `train_encoder=False` the whole encoder is frozen and no graph of it is built.
    """

    head: NNCLRHead

    def __init__(
        self,
        stage: SelfSupervised,
        encoder: VisionEncoder,
        head: NNCLRHead,
        seed: int,
        train_encoder: bool = True,
    ) -> None:
        super().__init__(stage, encoder, seed)
        self.head, self.train_encoder = head, train_encoder
        if not train_encoder:
            encoder.requires_grad_(False).eval()

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """The symmetrised NNCLR loss, [] and scalars to log."""
        images = flat(views.images)
        kept = None
        if views.ids_shuffle is not None:
            order = flat(views.ids_shuffle)
            kept = order[:, : self.visible(order.shape[1])]
        with self.autocast(images.device):
            with torch.set_grad_enabled(self.train_encoder and torch.is_grad_enabled()):
                tokens = self.encoder(images, kept)
            features = self.encoder.pool(tokens, self.pooling).unflatten(0, views.images.shape[:2])
            out = self.head(features, views.ids, views.labels, views.neighbors)
        return out.loss, out.metrics
