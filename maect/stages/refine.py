"""MIM-Refiner: heads on several blocks of a frozen encoder, then refinement of the encoder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from maect.recipes import LOCAL, CropScale, Encoder, Refiner, View
from maect.stages.base import UpperLayers, WithoutLabels
from maect.train.stage import Stage

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import RefinerObjective


class RefineHeads(WithoutLabels):
    """Initialisation of MIM-Refiner's heads on the frozen encoder (Alkin et al. 2025)."""

    name: ClassVar[str] = "refine_heads"
    title: ClassVar[str] = "Initialising the heads of {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune")
    trains_encoder: ClassVar[bool] = False

    augmentation: Literal["min", "aug"]
    mask_ratio: float = Field(default=0.0, ge=0, le=0)
    local_views: int = Field(ge=0)
    """Local views of an image, in addition to the two global ones."""
    local_size: int = Field(gt=0)
    """Height and width of a local view in pixels."""
    local_scale: CropScale | None = None
    """Replaces the crop scale of local views, 0.05 to 0.25."""
    warmup_epochs: float = Field(ge=0)
    min_lr: float = Field(ge=0)
    """Learning rate of the uppermost layers, or of the heads, at which the cosine ends."""
    head: Refiner
    pool: Literal["cls", "mean"] | None = None
    """Replaces the encoder size's pooling, for heads and evaluations: [CLS] or the mean of the
    patch tokens. `refine_heads` exports a copy of the source's encoder, with its pooling."""

    @model_validator(mode="after")
    def _consistent(self) -> "RefineHeads":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr} is above the peak learning rate")
        return self

    @property
    def head_settings(self) -> Mapping[str, Refiner]:
        """Settings of all heads, which are one part."""
        return {"heads": self.head}

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_epochs / self.epochs

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the heads."""
        return self.scaled_lr(self.head.head_lr)

    @property
    def lowest(self) -> float:
        """Fraction of the peak learning rates where the cosine ends."""
        return self.min_lr / self.peak_lr

    def export_pooling(self, encoder: Encoder) -> Literal["cls", "mean"]:
        """Return how heads, and evaluations of its outputs, pool the tokens."""
        return self.pool or super().export_pooling(encoder)

    def view_settings(self) -> tuple[View, ...]:
        """Return two global views, then the local ones."""
        changes: dict[str, Any] = {"size": self.local_size, "crop_scale": self.local_scale}
        changes |= {key: getattr(self, key) for key in ("flip", "jitter", "blur", "gray")}
        changes = {key: value for key, value in changes.items() if value is not None}
        local = LOCAL[self.augmentation].model_copy(update=changes)
        return (*super().view_settings(), *[local] * self.local_views)

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse blocks that are missing and local views that are not smaller (ValueError)."""
        super().check_encoder(encoder)
        self.head.read(encoder.depth)
        if self.local_views and self.local_size >= encoder.image_size:
            raise ValueError(
                f"local_size {self.local_size} is not below image_size {encoder.image_size}"
            )

    def check_source(self, encoder: Encoder, source: Stage, source_encoder: Encoder) -> None:
        """Refuse heads on blocks without a head in the run to start from (ValueError)."""
        super().check_source(encoder, source, source_encoder)
        if "heads" not in self._continued_heads(source):
            return
        before = cast(RefineHeads, source)
        ours = self.export_pooling(encoder)
        theirs = before.export_pooling(encoder)
        if ours != theirs:
            raise ValueError(f"pool {ours} differs from {theirs}")
        there = before.head.read(encoder.depth)
        missing = sorted(set(self.head.read(encoder.depth)) - set(there))
        if missing:
            raise ValueError(f"head.blocks: block {missing[0]} has no head among {list(there)}")

    def objective(self, encoder: Encoder, seed: int) -> "RefinerObjective":
        """Return encoder and heads, with random weights."""
        from maect.models.refiner import RefinerHeads
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import RefinerObjective

        blocks = self.head.read(encoder.depth)
        views = len(self.view_settings())
        with seeded(seed):
            vit = build_encoder(encoder)
            heads = RefinerHeads(encoder.width, self.head, blocks, views)
        if self.trains_encoder:
            vit.freeze(encoder.depth - self.trained_blocks(encoder))
        return RefinerObjective(self, vit, heads, seed)


class Refine(UpperLayers, RefineHeads):
    """Refinement of the encoder by all heads; a run exports its running average."""

    name: ClassVar[str] = "refine"
    title: ClassVar[str] = "Refining {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("refine_heads", "pretrain", "import")
    trains_encoder: ClassVar[bool] = True
    continues_heads: ClassVar[bool] = True

    frozen_blocks: int = Field(default=0, ge=0)
    class_token_decay: bool = False
    """Whether [CLS] and registers have weight decay."""
    encoder_ema: float = Field(ge=0, lt=1)

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the uppermost layers of the encoder."""
        return self.scaled_lr(self.base_lr)

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Return learning rate and weight decay: the lower the layer, the lower the rate."""
        lr, weight_decay = super().encoder_rates(name, depth)
        token = name in ("cls_token", "reg_token") and not self.class_token_decay
        return lr, 0.0 if token else weight_decay

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average, which a run exports."""
        return self.encoder_ema
