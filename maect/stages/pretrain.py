"""MAE pre-training."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from maect.recipes import Encoder
from maect.recipes.cost import Cost, decoder_cost, view_groups
from maect.recipes.settings import PLAIN, Computing
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
    """Weight of the contrastive loss relative to MAE's."""

    @model_validator(mode="after")
    def _consistent(self) -> "Pretrain":
        if (self.contrastive == "none") != (self.head is None):
            raise ValueError("`head` settings belong to contrastive: combined or detached")
        return self

    def objective(self, encoder: Encoder, seed: int) -> "MaskedAutoencoder":
        """Return the masked autoencoder with random weights."""
        from maect.models.decoder import Decoder
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import MaskedAutoencoder

        with seeded(seed):
            vit = build_encoder(encoder)
            decoder = Decoder(encoder)
            head = NNCLRHead(encoder.width, self.head) if self.head else None
        return MaskedAutoencoder(
            self,
            vit,
            decoder,
            head,
            seed,
            normalize_pixels=self.normalize_pixels,
            weight=self.contrastive_weight,
        )

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Return the rates of encoder and decoder, the same for all parameters."""
        return self.scaled_lr(self.base_lr), self.weight_decay

    def export_pooling(self, encoder: Encoder) -> Literal["cls", "mean"]:
        """Return how evaluations pool an encoder that was only pre-trained."""
        return encoder.mae_pooling

    @property
    def reaches_encoder(self) -> bool:
        """Return whether the head's gradient reaches the encoder: only if they are combined."""
        return self.contrastive == "combined"

    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Return the costs of encoder, decoder and head, in the forward pass' order."""
        costs = super().costs(encoder, computing)
        (group,) = view_groups(encoder, self.view_settings(), self.mask_ratio)
        decoder = decoder_cost(self.passes(computing), encoder, group, self.mask_ratio)
        return {"encoder": costs.pop("encoder"), "decoder": decoder, **costs}
