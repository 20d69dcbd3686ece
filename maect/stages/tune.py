"""Contrastive tuning."""

from pydantic import Field, model_validator

from maect.recipes import Contrastive
from maect.stages.base import Stage, check_contrastive


class Tune(Stage):
    """Contrastive tuning of the upper part of the encoder (paper, tables 7 and 8)."""

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    layer_decay: float = Field(gt=0, le=1)
    frozen_blocks: int = Field(ge=0)
    encoder_ema: float = Field(ge=0, lt=1)
    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Tune":
        check_contrastive(self, self.head)
        return self
