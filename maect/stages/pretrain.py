"""MAE pre-training."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from maect.recipes import Encoder, visible_patches
from maect.recipes.flops import decoder_flops, head_flops, head_parameters, parameters, view_flops
from maect.recipes.memory import (
    Footprint,
    decoder_activations,
    decoder_parameters,
    encoder_activations,
    footprint,
    head_activations,
    head_buffers,
    head_weights,
)
from maect.stages.base import SelfSupervised

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import MaskedAutoencoder


class Pretrain(SelfSupervised):
    """MAE pre-training, alone or together with an NNCLR head."""

    name: ClassVar[str] = "pretrain"
    title: ClassVar[str] = "Pre-training {run}"

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    normalize_pixels: bool = True
    contrastive: Literal["none", "combined", "detached"] = "none"
    """`detached` trains the head on the encoder's output without changing the encoder."""
    contrastive_weight: float = Field(default=0.001, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> "Pretrain":
        if (self.contrastive == "none") != (self.head is None):
            raise ValueError("`head` settings belong to contrastive: combined or detached")
        return self.check_contrastive()

    def objective(self, encoder: Encoder, seed: int) -> "MaskedAutoencoder":
        """The masked autoencoder with random weights."""
        from maect.models.decoder import Decoder
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import MaskedAutoencoder

        with seeded(seed):
            vit, decoder = build_encoder(encoder), Decoder(encoder)
            head = NNCLRHead(encoder.width, self.head) if self.head else None
        vit.checkpointing = decoder.checkpointing = self.activation_checkpointing
        return MaskedAutoencoder(
            self, vit, decoder, head, seed,
            normalize_pixels=self.normalize_pixels,
            detached=self.contrastive == "detached",
            weight=self.contrastive_weight,
        )  # fmt: skip

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """The same for all of encoder and decoder."""
        return self.scaled_lr(self.base_lr), self.weight_decay

    def pooling(self, encoder: Encoder) -> Literal["cls", "mean"]:
        """As evaluations pool an encoder that was only pre-trained."""
        return encoder.mae_pooling

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        view = view_flops(encoder, tokens) + 3 * decoder_flops(encoder, tokens)
        if self.head is not None:
            combined = self.contrastive == "combined"
            view += head_flops(self.head, encoder.width, self.batch_size, combined)
        return self.views * view

    def footprint(self, encoder: Encoder, images: int) -> Footprint:
        """Device memory of a pass over this many images on one rank."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        parts = [
            encoder_activations(self, encoder, tokens, encoder.depth),
            decoder_activations(self, encoder, tokens, self.mask_ratio),
        ]
        weights, buffers = parameters(encoder) + decoder_parameters(encoder), 0
        if self.head is not None:
            parts.append(head_activations(self, self.head, encoder.width))
            weights += head_weights(self.head, encoder.width)
            buffers = head_buffers(self.head, encoder.width)
        return footprint(
            self, encoder, self.views * images, parts,
            weights=weights, trained=weights, buffers=buffers,
        )  # fmt: skip

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a finished run leaves."""
        learnt = parameters(encoder) + encoder.decoder_depth * 12 * encoder.decoder_width**2
        if self.head is not None:
            learnt += head_parameters(self.head, encoder.width)
        return self._state(learnt, 0, learnt)
