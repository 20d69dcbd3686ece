"""The self-supervised stages as modules: from a batch of views to a loss."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maect.data.loader import Batch
from maect.data.random import ids_shuffle, lookup_numbers, wrong_lookups
from maect.data.transforms import apply_changes, draw_changes
from maect.measures import effective_rank, uniformity
from maect.models.decoder import Decoder, patchify, reconstruction_loss, unpatchify
from maect.models.heads import NNCLRHead, QueueHead
from maect.models.kernels import mixed_precision
from maect.models.refiner import RefinerHeads, head_weights
from maect.models.vit import Pooling, VisionEncoder
from maect.recipes import views_by_size, visible_patches
from maect.stages.base import WithoutLabels
from maect.train.objective import Gathered, Objective
from maect.train.passes import Passes

UNIFORMITY_LIMIT = -0.02
RANK_LIMIT = 1.2


@dataclass
class Views:
    """One rank's part of a batch, on the device.

    Attributes:
        images: of each size, in the order of the first view of each, augmented and normalized,
            float32 [views, b, C, S, S].
        ids_shuffle: patch numbers of each view of the first size, the visible ones first, int64
            [views, b, L].
        ids: stable sample ids, int64 [b].
        labels: int64 [b], -1 where unknown.
        neighbors: position among the k nearest of the neighbour to take (`lookup_numbers`), for
            each view of the first size and each head of a `RefinerHeads`, int64 [heads * views, b];
            k is added where an oracle is to be wrong.
        weights: of each sample in the loss of each head, float32 [heads, b]; None: 1.
    """

    images: tuple[Tensor, ...]
    ids_shuffle: Tensor | None
    ids: Tensor
    labels: Tensor
    neighbors: Tensor | None
    weights: Tensor | None = None


class ViewsObjective(Objective):
    """Base of the objectives on views, with any number of heads with a queue among its parts."""

    def __init__(self, stage: WithoutLabels, encoder: VisionEncoder, seed: int) -> None:
        """Freeze the encoder unless the stage trains it; everything is drawn from `seed`."""
        super().__init__()
        self.stage = stage
        self.seed = seed
        self.view_settings = stage.view_settings()
        self.head_pooling: Literal["cls", "mean"] = encoder.settings.ct_pooling
        self.export_pooling: Pooling = stage.export_pooling(encoder.settings)
        """How evaluations pool the encoder that the run exports."""
        self.encoder = encoder
        if not stage.trains_encoder:
            encoder.requires_grad_(False).eval()
        self.sizes = views_by_size(self.view_settings, encoder.settings.image_size)

    @cached_property
    def queue_heads(self) -> dict[str, QueueHead]:
        """Return all heads, by their names in this module."""
        return {name: part for name, part in self.named_modules() if isinstance(part, QueueHead)}

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return a context with matrix products in bfloat16; parameters stay in float32."""
        return mixed_precision(device, self.stage.precision)

    def visible(self, patches: int) -> int:
        """Return the number of patches that the encoder sees."""
        return visible_patches(patches, self.stage.mask_ratio)

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Draw masks and lookup numbers, as `Views` has them."""
        drawn: dict[str, Tensor] = {}
        first_views = next(iter(self.sizes.values()))
        if self.stage.mask_ratio:
            patches = self.encoder.settings.patches
            drawn["ids_shuffle"] = ids_shuffle(patches, self.seed, epochs, ids, first_views)
        head = next(iter(self.queue_heads.values()), None)
        if head is not None:  # all heads share the numbers
            topk, right = head.settings.topk, head.settings.right
            lookups = head.lookups * len(first_views)
            drawn["neighbors"] = lookup_numbers(topk, self.seed, epochs, ids, lookups)
            if right < 1:
                wrong = wrong_lookups(right, self.seed, epochs, ids, lookups)
                drawn["neighbors"] += topk * wrong
        return drawn

    def prepare(self, batch: Batch, device: torch.device) -> Views:
        """Augment the views of a batch, and add masks and lookup numbers."""
        cropped, values = batch.to(device, self.draw)
        pixels = self.encoder.settings.pixels
        images = []
        for numbers, raw in zip(self.sizes.values(), cropped, strict=True):
            views = {number: self.view_settings[number] for number in numbers}
            changes = draw_changes(views, self.seed, batch.epochs, batch.ids)
            images.append(apply_changes(flat(raw), changes, pixels).unflatten(0, raw.shape[:2]))
        return Views(
            images=tuple(images),
            ids_shuffle=values.get("ids_shuffle"),
            ids=values["ids"],
            labels=values["labels"],
            neighbors=values.get("neighbors"),
            weights=values.get("weights"),
        )

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """Return the pooled tokens of whole images, [b, D]."""
        encoder = cast(VisionEncoder, parts["encoder"])
        with self.autocast(images.device):
            return encoder.pool(encoder(images).tokens, self.export_pooling)

    def changing_buffers(self) -> list[Tensor]:
        """Return the heads' queues and statistics."""
        return [buffer for head in self.queue_heads.values() for buffer in head.buffers()]

    def forget_samples(self, fields: Collection[str]) -> None:
        """Forget `ids` or `labels` of the samples in the queues that heads took over."""
        for head in self.queue_heads.values():
            head.forget_samples(fields)

    def after_update(self, gathered: Gathered) -> None:
        """Move each EMA projector towards its projector."""
        for head in self.queue_heads.values():
            head.after_update(gathered)

    @property
    def has_health(self) -> bool:
        """Return whether embeddings can be checked: if there is a head."""
        return bool(self.queue_heads)

    def health(self, batch_size: int) -> tuple[dict[str, float], str | None]:
        """Return the spread of each queue's newest vectors, and the first fault found in it.

        They are the same on every rank. With several queues, names end on that of the head, such
        as `uniformity.heads.3`.
        """
        values: dict[str, float] = {}
        faults: list[str] = []
        queues = {
            f"{name}{part}": vectors
            for name, head in self.queue_heads.items()
            for part, vectors in head.newest(batch_size).items()
        }
        for name, vectors in queues.items():
            found = {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}
            fault = collapse(found)
            if len(queues) > 1:
                found = {f"{key}.{name}": value for key, value in found.items()}
            values |= found
            if fault is not None:
                faults.append(f"{name}: {fault}" if len(queues) > 1 else fault)
        return values, next(iter(faults), None)


def collapse(spread: dict[str, float]) -> str | None:
    """Return the fault that `uniformity` and `effective_rank` show, or None."""
    if spread["uniformity"] > UNIFORMITY_LIMIT:
        return f"all embeddings are nearly the same (uniformity {spread['uniformity']:.4f})"
    if spread["effective_rank"] < RANK_LIMIT:
        return f"all embeddings lie on a line (effective rank {spread['effective_rank']:.2f})"
    return None


def flat(x: Tensor) -> Tensor:
    """Return [views, b, ...] as [views * b, ...]."""
    return x.flatten(0, 1)


class MaskedAutoencoder(ViewsObjective):
    """MAE pre-training, with an NNCLR head in addition to the decoder if one is given.

    With `detached` the head learns without changing the encoder and its loss needs no weight;
    otherwise the loss is MAE + weight * NNCLR (paper, section 4.4).
    """

    passes: Passes

    def __init__(
        self,
        stage: WithoutLabels,
        encoder: VisionEncoder,
        decoder: Decoder,
        head: NNCLRHead | None,
        seed: int,
        *,
        normalize_pixels: bool,
        weight: float,
    ) -> None:
        """Join encoder, decoder and head.

        Args:
            normalize_pixels: whether each patch is reconstructed with mean 0 and variance 1.
            weight: of the NNCLR loss, if it reaches the encoder.
        """
        super().__init__(stage, encoder, seed)
        # In this order: DeepSpeed lays parameters out as modules list them.
        self.decoder = decoder
        self.head = head
        self.normalize_pixels = normalize_pixels
        self.detached = not stage.reaches_encoder
        self.weight = 1.0 if self.detached else weight
        self.passes = Passes(self.compute, [encoder, decoder])

    def compute(self, images: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        """Compute MAE's loss [] and, for a head, the pooled visible tokens [b, D].

        Args:
            images: normalized, [b, C, S, S].
            order: patch numbers, int64 [b, L], the visible ones first.
        """
        visible = self.visible(order.shape[1])
        with self.autocast(images.device):
            tokens = self.encoder(images, order[:, :visible]).tokens
            prediction = self.decoder(tokens, order)
            loss = reconstruction_loss(prediction, images, order, visible, self.normalize_pixels)
            if self.head is None:
                return (loss,)
            features = self.encoder.pool(tokens, self.head_pooling)
            return loss, features.detach() if self.detached else features

    def inputs_of_passes(self, views: Views) -> list[tuple[Tensor, ...]]:
        """Return all views as one batch."""
        assert views.ids_shuffle is not None
        return [(flat(views.images[0]), flat(views.ids_shuffle))]

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss over all views, [], and scalars to log."""
        (tensors,) = self.inputs_of_passes(views)
        loss, *pooled = self.passes(*tensors)
        if self.head is None:
            return loss, {}
        with self.autocast(loss.device):
            features = pooled[0].unflatten(0, views.images[0].shape[:2])
            out = self.head(features, views.ids, views.labels, views.neighbors)
        total = loss + self.weight * out.loss
        parts = {"loss_mae": loss.detach(), "loss_nnclr": out.loss.detach()}
        return total, parts | out.metrics

    def parts_read(self) -> dict[str, nn.Module]:
        """Return the encoder, and the decoder for pictures."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    def reconstruct(
        self, parts: nn.ModuleDict, images: Tensor, ids_shuffle: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return images with visible patches on grey, and with the others as predicted.

        A patch that was predicted without mean and standard deviation is given its own. See
        `Objective.reconstruct`.
        """
        encoder, decoder = cast(VisionEncoder, parts["encoder"]), parts["decoder"]
        visible = self.visible(ids_shuffle.shape[1])
        with self.autocast(images.device):
            tokens = encoder(images, ids_shuffle[:, :visible]).tokens
            predicted = decoder(tokens, ids_shuffle).float()
        patch = encoder.settings.patch_size
        target = patchify(images.float(), patch)
        if self.normalize_pixels:
            variance, mean = torch.var_mean(target, dim=2, keepdim=True)
            predicted = predicted * (variance + 1e-6).sqrt() + mean
        shown = torch.zeros_like(ids_shuffle, dtype=torch.bool)
        shown.scatter_(1, ids_shuffle[:, :visible], True)
        seen = target.where(shown[:, :, None], torch.zeros_like(target))
        completed = target.where(shown[:, :, None], predicted)
        return unpatchify(seen, patch), unpatchify(completed, patch)


class ContrastiveObjective(ViewsObjective):
    """The NNCLR loss on top of the encoder: head initialisation and contrastive tuning."""

    passes: Passes

    def __init__(
        self, stage: WithoutLabels, encoder: VisionEncoder, head: NNCLRHead, seed: int
    ) -> None:
        super().__init__(stage, encoder, seed)
        self.head = head
        self.passes = Passes(self.compute, [encoder])

    def compute(self, images: Tensor, kept: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute the pooled tokens [b, D] of images [b, C, S, S].

        `kept`, int64 [b, K], are numbers of the patches to encode; None: all.
        """
        learns = self.stage.trains_encoder and torch.is_grad_enabled()
        with self.autocast(images.device), torch.set_grad_enabled(learns):
            tokens = self.encoder(images, kept).tokens
            return (self.encoder.pool(tokens, self.head_pooling),)

    def inputs_of_passes(self, views: Views) -> list[tuple[Tensor, ...]]:
        """Return all views as one batch, with their visible patches if they are masked."""
        images = flat(views.images[0])
        if views.ids_shuffle is None:
            return [(images,)]
        order = flat(views.ids_shuffle)
        return [(images, order[:, : self.visible(order.shape[1])])]

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the symmetrised NNCLR loss, [], and scalars to log."""
        (tensors,) = self.inputs_of_passes(views)
        (features,) = self.passes(*tensors)
        with self.autocast(features.device):
            features = features.unflatten(0, views.images[0].shape[:2])
            out = self.head(features, views.ids, views.labels, views.neighbors)
        return out.loss, out.metrics


class RefinerObjective(ViewsObjective):
    """MIM-Refiner: the sum of the losses of heads on several blocks."""

    passes: Passes

    def __init__(
        self, stage: WithoutLabels, encoder: VisionEncoder, heads: RefinerHeads, seed: int
    ) -> None:
        super().__init__(stage, encoder, seed)
        self.head_pooling = stage.export_pooling(encoder.settings)
        self.heads = heads
        self.passes = Passes(self.compute, [encoder])

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Draw lookup numbers and, if they change, set the weights of the heads' losses."""
        drawn = super().draw(epochs, ids)
        schedule = self.heads.settings.weights
        if schedule is not None:
            heads = len(self.heads.numbers)
            weights = head_weights(schedule, heads, self.stage.epochs, epochs)
            drawn["weights"] = torch.from_numpy(weights)
        return drawn

    def compute(self, images: Tensor) -> tuple[Tensor, ...]:
        """Compute the features that each head reads of images of one size, [H, b, D].

        Each reads the pooled raw output of its block, and the last head the encoder's output
        behind the final norm.

        Args:
            images: normalized, [b, C, S, S].
        """
        lower = self.heads.numbers[:-1]
        learns = self.stage.trains_encoder and torch.is_grad_enabled()
        with self.autocast(images.device), torch.set_grad_enabled(learns):
            found = self.encoder(images, blocks=lower, pooling=self.head_pooling)
            last = self.encoder.pool(found.tokens, self.head_pooling)
            return (torch.stack([*(found.blocks[block] for block in lower), last]),)

    def inputs_of_passes(self, views: Views) -> list[tuple[Tensor, ...]]:
        """Return the views of each size as one batch."""
        return [(flat(images),) for images in views.images]

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the heads' losses, [], and scalars to log."""
        features = []
        for images, tensors in zip(views.images, self.inputs_of_passes(views), strict=True):
            (pooled,) = self.passes(*tensors)
            features.append(pooled.unflatten(1, images.shape[:2]))
        with self.autocast(views.ids.device):
            out = self.heads(
                torch.cat(features, 1), views.ids, views.labels, views.neighbors, views.weights
            )
        return out.loss, out.metrics
