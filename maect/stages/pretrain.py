"""MAE pre-training."""

from typing import Literal

from pydantic import Field, model_validator

from maect.recipes import Contrastive
from maect.stages.base import Stage, check_contrastive


class Pretrain(Stage):
    """MAE pre-training, alone or together with an NNCLR head."""

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    normalize_pixels: bool = True
    contrastive: Literal["none", "combined", "detached"] = "none"
    """`detached` trains the head on the encoder's output without changing the encoder."""
    contrastive_weight: float = Field(default=0.001, gt=0)
    head: Contrastive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Pretrain":
        if (self.contrastive == "none") != (self.head is None):
            raise ValueError("`head` settings belong to contrastive: combined or detached")
        if self.head is not None:
            check_contrastive(self, self.head)
        return self
