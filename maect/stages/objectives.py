"""The stages that train as modules: from a batch to a loss."""

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.data.loader import Batch
from maect.data.random import drop_path_factors, ids_shuffle, lookup_numbers
from maect.data.transforms import (
    apply_changes,
    apply_mix,
    augment,
    draw_changes,
    draw_mix,
    erase,
    normalize,
    partners,
)
from maect.models.decoder import Decoder, patchify, reconstruction_loss, unpatchify
from maect.models.heads import NNCLRHead
from maect.models.vit import Pooling, VisionEncoder, mixed_precision, seeded
from maect.recipes import visible_patches
from maect.stages.base import SelfSupervised, Supervised
from maect.train.look import uniformity
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
        self.left_pooling: Pooling = self.pooling
        """What evaluations of the encoder that is left read."""
        self.encoder, self.head = encoder, None

    def autocast(self, device: torch.device) -> torch.autocast:
        """bfloat16 for matrix products; parameters stay in float32."""
        return mixed_precision(device, self.stage.precision)

    def visible(self, patches: int) -> int:
        """How many patches the encoder sees."""
        return visible_patches(patches, self.stage.mask_ratio)

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Masks and lookup numbers, as `Views` has them."""
        stage, seed, views, drawn = self.stage, self.seed, len(self.view_settings), {}
        if stage.mask_ratio:
            patches = self.encoder.settings.patches
            drawn["ids_shuffle"] = ids_shuffle(patches, seed, epochs, ids, views)
        if stage.head is not None:
            drawn["neighbors"] = lookup_numbers(stage.head.topk, seed, epochs, ids, views)
        return drawn

    def prepare(self, batch: Batch, device: torch.device) -> Views:
        """Augmented views, masks and lookup numbers of a batch."""
        values = batch.on(device, self.draw)
        raw = values["images"]
        changes = draw_changes(self.view_settings, self.seed, batch.epochs, batch.ids)
        pixels = self.encoder.settings.pixels
        images = apply_changes(flat(raw), changes, pixels).unflatten(0, raw.shape[:2])
        shuffle, neighbors = values.get("ids_shuffle"), values.get("neighbors")
        return Views(images, shuffle, values["ids"], values["labels"], neighbors)

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """Pooled tokens of whole images, [b, D]."""
        encoder = cast(VisionEncoder, parts["encoder"])
        with self.autocast(images.device):
            return encoder.pool(encoder(images), self.left_pooling)

    def changing_buffers(self) -> list[Tensor]:
        """The head's queue and statistics."""
        return [] if self.head is None else list(self.head.buffers())

    def after_update(self, gathered: Gathered) -> None:
        """Move the EMA projector towards the projector."""
        if self.head is not None and self.head.slow_projector is not None:
            with gathered(self.head.projector):
                self.head.update_ema()

    @property
    def has_health(self) -> bool:
        """With a head."""
        return self.head is not None

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
        stage: SelfSupervised,
        encoder: VisionEncoder,
        decoder: Decoder,
        head: NNCLRHead | None,
        seed: int,
        *,
        normalize_pixels: bool,
        detached: bool,
        weight: float,
    ) -> None:
        super().__init__(stage, encoder, seed)
        # In this order: DeepSpeed lays parameters out as modules list them.
        self.decoder, self.head = decoder, head
        self.left_pooling = encoder.settings.mae_pooling
        self.normalize_pixels, self.detached = normalize_pixels, detached
        self.weight = 1.0 if detached else weight

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

    def parts_read(self) -> dict[str, nn.Module]:
        """The encoder, and the decoder for pictures."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    def reconstruct(
        self, parts: nn.ModuleDict, images: Tensor, ids_shuffle: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Visible patches on grey, and the prediction for the others beside them.

        A patch that was predicted without mean and standard deviation is given its own.
        """
        encoder, decoder = cast(VisionEncoder, parts["encoder"]), parts["decoder"]
        visible = self.visible(ids_shuffle.shape[1])
        with self.autocast(images.device):
            predicted = decoder(encoder(images, ids_shuffle[:, :visible]), ids_shuffle).float()
        patch = encoder.settings.patch_size
        target = patchify(images.float(), patch)
        if self.normalize_pixels:
            variance, mean = torch.var_mean(target, dim=2, keepdim=True)
            predicted = predicted * (variance + 1e-6).sqrt() + mean
        shown = torch.zeros_like(ids_shuffle, dtype=torch.bool)
        shown.scatter_(1, ids_shuffle[:, :visible], True)
        seen = target.where(shown[:, :, None], torch.zeros_like(target))
        return unpatchify(seen, patch), unpatchify(
            target.where(shown[:, :, None], predicted), patch
        )


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

    def __init__(
        self, stage: Supervised, encoder: VisionEncoder, classes: int, pooling: Pooling, seed: int
    ) -> None:
        """Put a new classifier on an encoder.

        Args:
            stage: the settings.
            encoder: changed in place: frozen blocks, drop path, and no final norm for `fc_norm`.
            classes: number of outputs.
            pooling: what the encoder's file says, for `pooling: encoder`.
            seed: of the classifier's weights and of everything drawn.

        Raises:
            UserError: more frozen blocks than there are, or no [CLS] token to pool.
        """
        super().__init__()
        width, depth = encoder.settings.width, encoder.settings.depth
        if stage.frozen_blocks > depth:
            raise UserError(f"frozen_blocks {stage.frozen_blocks}: the encoder has {depth} blocks")
        encoder.requires_grad_(True).freeze(stage.frozen_blocks)
        encoder.checkpointing = stage.activation_checkpointing
        self.stage, self.seed = stage, seed
        self.pooling: Pooling = pooling if stage.pooling == "encoder" else stage.pooling
        if self.pooling == "cls" and not encoder.settings.class_token:
            raise UserError("pooling cls: this encoder has no [CLS] token; set pooling=mean")
        self.fc_norm: nn.Module = nn.Identity()
        if self.pooling == "fc_norm":
            encoder.norm = nn.Identity()
            self.fc_norm = nn.LayerNorm(width, eps=1e-6)
        self.encoder, self.drop_paths = encoder, []
        if stage.drop_path:
            self.drop_paths = insert_drop_paths(encoder)
        with seeded(seed):
            self.head = nn.Linear(width, classes)
            nn.init.trunc_normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Which residual branches are dropped, as `Examples` has it."""
        if not self.stage.drop_path:
            return {}
        rates = np.array(drop_rates(self.stage, self.encoder.settings.depth))
        return {"kept": drop_path_factors(rates, self.seed, epochs, ids)}

    def prepare(self, batch: Batch, device: torch.device) -> Examples:
        """Flipped, erased and mixed images, and which residual branches are dropped."""
        stage, seed, ids, epochs = self.stage, self.seed, batch.ids, batch.epochs
        (view,) = stage.view_settings()
        values = batch.on(device, self.draw)
        images = augment(
            values["images"][0], view, 0, seed, epochs, ids, self.encoder.settings.pixels
        )
        erase(images, stage.random_erasing, seed, epochs, ids)
        mix = draw_mix(stage.mixup, stage.cutmix, images.shape[-1], seed, batch.step)
        kept = values.get("kept")
        return Examples(apply_mix(images, mix), values["labels"], mix.share, kept)

    def forward(self, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy with the smoothed, mixed labels, []."""
        for number, drop_path in enumerate(self.drop_paths):
            drop_path.factor = None if batch.kept is None else batch.kept[number]
        logits = self.logits(batch.images)
        smoothing = self.stage.label_smoothing
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
        if batch.share < 1:
            # Linear in the labels: what timm's soft targets give.
            other = F.cross_entropy(logits, partners(batch.labels), label_smoothing=smoothing)
            loss = batch.share * loss + (1 - batch.share) * other
        return loss, {}

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Class of each image, uint8 [b, 3, S, S]: int64 [b]."""
        for drop_path in self.drop_paths:
            drop_path.factor = None
        return self.logits(normalize(images, self.encoder.settings.pixels)).argmax(dim=1)

    def logits(self, images: Tensor) -> Tensor:
        """Float32 [b, classes] of normalized images [b, 3, S, S]."""
        pooled = self._pooled(self.encoder, self.fc_norm, images)
        with torch.autocast(images.device.type, enabled=False):
            logits: Tensor = self.head(pooled)
        return logits

    def parts_read(self) -> dict[str, nn.Module]:
        """The encoder, and the norm after pooling."""
        return {"encoder": self.encoder, "fc_norm": self.fc_norm}

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """What the classifier reads, [b, D]."""
        return self._pooled(cast(VisionEncoder, parts["encoder"]), parts["fc_norm"], images)

    def _pooled(self, encoder: VisionEncoder, norm: nn.Module, images: Tensor) -> Tensor:
        how = "mean" if self.pooling == "fc_norm" else self.pooling
        with mixed_precision(images.device, self.stage.precision):
            tokens = encoder(images)
        with torch.autocast(images.device.type, enabled=False):
            pooled: Tensor = norm(encoder.pool(tokens.float(), how))
        return pooled


def insert_drop_paths(encoder: VisionTransformer) -> list[DropPath]:
    """Put one behind each residual branch: attention and MLP of block 0, of block 1, ..."""
    inserted = []
    for block in encoder.blocks:
        block.drop_path1, block.drop_path2 = DropPath(), DropPath()
        inserted += [block.drop_path1, block.drop_path2]
    return inserted


def drop_rates(stage: Supervised, depth: int) -> list[float]:
    """Probability of dropping each residual branch, [2 * depth]: both of a block have the same."""
    if stage.drop_path_schedule == "constant" or depth == 1:
        rates = [stage.drop_path] * depth
    else:
        rates = [stage.drop_path * block / (depth - 1) for block in range(depth)]
    return [rate for rate in rates for _ in range(2)]


UNIFORMITY_LIMIT = -0.02
RANK_LIMIT = 1.2


def newest(head: NNCLRHead, count: int) -> Tensor:
    """The vectors that entered the queue last: the global batch, the same on every rank."""
    end = int(head.pointer) or len(head.queue)
    return head.queue[end - count : end]


def effective_rank(vectors: Tensor) -> float:
    """Exponential of the entropy of the covariance's spectrum (Roy and Vetterli 2007), 1 to E."""
    centred = vectors.double() - vectors.double().mean(0)
    # On the CPU: a GPU's solver is loaded for seconds and is the slower one at this size.
    spectrum = torch.linalg.eigvalsh((centred.T @ centred).cpu()).clamp(min=0)
    total = spectrum.sum()
    if total <= 0:
        return 0.0
    share = spectrum / total
    return float(torch.special.entr(share).sum().exp())


def collapse(spread: dict[str, float]) -> str | None:
    """What is wrong with the values of `uniformity` and `effective_rank`, if anything."""
    if spread["uniformity"] > UNIFORMITY_LIMIT:
        return f"all embeddings are nearly the same (uniformity {spread['uniformity']:.4f})"
    if spread["effective_rank"] < RANK_LIMIT:
        return f"all embeddings lie on a line (effective rank {spread['effective_rank']:.2f})"
    return None
