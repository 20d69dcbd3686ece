"""What every training stage has in common."""

from typing import Literal

from pydantic import Field

from maect.core.settings import Settings
from maect.recipes import AUGMENTATIONS, Contrastive, View


class Stage(Settings):
    """What every training stage has in common."""

    epochs: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Images in the global batch, over all ranks; each gives `views` views."""
    augmentation: Literal["mae", "min", "aug"]
    crop_scale: tuple[float, float] | None = None
    """Replaces the augmentation's crop scale, for images whose object fills the frame."""
    flip: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of a horizontal flip (0 where left and right mean something)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    warmup_fraction: float = Field(ge=0, lt=1)
    lr_counts_views: bool = True
    """lr = base_lr x batch_size x views / 256 (authors' code); False leaves `views` out."""
    precision: Literal["bf16", "fp32"] = "bf16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step. Only MAE: batch statistics forbid it elsewhere."""
    compile: bool = False
    attention: Literal["sdpa", "flash_attn"] = "sdpa"
    activation_checkpointing: bool = False

    views: int = Field(default=2, ge=1, le=2)
    mask_ratio: float = Field(default=0.0, ge=0, lt=1)

    def view_settings(self) -> tuple[View, ...]:
        """The views to make of each image, with this stage's overrides applied."""
        changes = {"crop_scale": self.crop_scale, "flip": self.flip}
        changes = {key: value for key, value in changes.items() if value is not None}
        return tuple(view.model_copy(update=changes) for view in AUGMENTATIONS[self.augmentation])[
            : self.views
        ]

    def scaled_lr(self, base_lr: float) -> float:
        """Peak learning rate by the linear scaling rule (paper, A.1)."""
        return base_lr * self.batch_size * (self.views if self.lr_counts_views else 1) / 256


def check_contrastive(stage: Stage, head: Contrastive) -> None:
    """Refuse what the contrastive loss cannot be computed with."""
    if stage.views != 2:
        raise ValueError("the contrastive loss needs views: 2")
    if head.queue_size % stage.batch_size:
        raise ValueError(
            f"batch_size {stage.batch_size} does not divide queue_size {head.queue_size}: "
            "the queue is filled in whole batches"
        )
    if head.topk > head.queue_size:
        raise ValueError(f"topk {head.topk} is larger than queue_size {head.queue_size}")
    if stage.accumulation != 1:
        raise ValueError(
            "accumulation must be 1 in contrastive stages: batch statistics and negatives are "
            "those of the whole global batch"
        )
