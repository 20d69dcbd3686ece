"""Contrastive tuning: initialisation of the NNCLR head on a frozen encoder, then tuning."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from maect.recipes import Contrastive, Encoder
from maect.stages.base import SelfSupervised, UpperLayers

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import ContrastiveObjective


class Head(SelfSupervised):
    """Initialisation of the NNCLR head on the frozen encoder."""

    name: ClassVar[str] = "head"
    title: ClassVar[str] = "Initialising the NNCLR head {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune")
    trains_encoder: ClassVar[bool] = False

    head: Contrastive

    def objective(self, encoder: Encoder, seed: int) -> "ContrastiveObjective":
        """Return encoder and head, with random weights."""
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import ContrastiveObjective

        with seeded(seed):
            vit = build_encoder(encoder)
            head = NNCLRHead(encoder.width, self.head)
        if self.trains_encoder:
            vit.freeze(encoder.depth - self.trained_blocks(encoder))
        return ContrastiveObjective(self, vit, head, seed)


class Tune(UpperLayers, Head):
    """Contrastive tuning of the upper part of the encoder (paper, tables 7 and 8)."""

    name: ClassVar[str] = "tune"
    title: ClassVar[str] = "Contrastive tuning of {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("head", "pretrain", "import")
    trains_encoder: ClassVar[bool] = True
    continues_heads: ClassVar[bool] = True

    encoder_ema: float = Field(ge=0, lt=1)
    """Momentum of the encoder's running average."""
    from_scratch: bool = False
    """Start from random weights instead of a run: a control."""

    @model_validator(mode="after")
    def _consistent(self) -> "Tune":
        if self.from_scratch and self.frozen_blocks:
            raise ValueError(
                f"from_scratch: frozen_blocks {self.frozen_blocks} would stay random; set it to 0"
            )
        return self

    @property
    def needs_source(self) -> bool:
        """Return whether it starts from a run: unless it starts from random weights."""
        return not self.from_scratch

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the uppermost layers of the encoder."""
        return self.scaled_lr(self.base_lr)

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average, which a run exports."""
        return self.encoder_ema
