"""Contrastive tuning."""

from typing import ClassVar

from pydantic import Field, model_validator

from maect.stages.base import UpperLayers
from maect.stages.head import Head


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
        """Whether it starts from a run: unless it starts from random weights."""
        return not self.from_scratch

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the uppermost layers of the encoder."""
        return self.scaled_lr(self.base_lr)

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average, which is what a run exports."""
        return self.encoder_ema
