"""Contrastive tuning."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from maect.recipes import Contrastive, Encoder
from maect.stages.base import SelfSupervised

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import ContrastiveObjective


class Tune(SelfSupervised):
    """Contrastive tuning of the upper part of the encoder (paper, tables 7 and 8)."""

    name: ClassVar[str] = "tune"
    title: ClassVar[str] = "Contrastive tuning of {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("head", "pretrain", "import")
    continues_heads: ClassVar[bool] = True

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    layer_decay: float = Field(gt=0, le=1)
    frozen_blocks: int = Field(ge=0)
    encoder_ema: float = Field(ge=0, lt=1)
    head: Contrastive
    from_scratch: bool = False
    """Begins with random weights, without a run to start from: a control."""

    @model_validator(mode="after")
    def _consistent(self) -> "Tune":
        if self.from_scratch and self.frozen_blocks:
            raise ValueError(
                f"from_scratch: frozen_blocks {self.frozen_blocks} would stay random; set it to 0"
            )
        return self.check_contrastive()

    @property
    def needs_source(self) -> bool:
        """Not from random weights."""
        return not self.from_scratch

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse to freeze every block."""
        super().check_encoder(encoder)
        if self.frozen_blocks >= encoder.depth:
            raise ValueError(
                f"frozen_blocks {self.frozen_blocks} leaves none of the "
                f"{encoder.depth} blocks to tune"
            )

    def trained_blocks(self, encoder: Encoder) -> int:
        """All but the frozen ones."""
        return encoder.depth - self.frozen_blocks

    def objective(self, encoder: Encoder, seed: int) -> "ContrastiveObjective":
        """Encoder and head, with random weights."""
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import ContrastiveObjective

        with seeded(seed):
            vit, head = build_encoder(encoder), NNCLRHead(encoder.width, self.head)
        vit.freeze(self.frozen_blocks)
        return ContrastiveObjective(self, vit, head, seed)

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Lower for lower layers."""
        from maect.train.optimizer import layer_scale

        scale = 1.0 if name is None else layer_scale(name, depth, self.layer_decay)
        return self.scaled_lr(self.base_lr) * scale, self.weight_decay

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average, which is what a run exports."""
        return self.encoder_ema
