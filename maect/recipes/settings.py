"""What a stage can be told, as types. A key that is not here is a spelling mistake."""

import difflib
import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from maect.errors import UserError


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Encoder(Settings):
    """A vision transformer's shape and how its output becomes one feature vector."""

    image_size: int = Field(gt=0)
    patch_size: int = Field(gt=0)
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    heads: int = Field(gt=0)
    decoder_width: int = Field(gt=0)
    decoder_depth: int = Field(gt=0)
    decoder_heads: int = Field(gt=0)
    mae_pooling: Literal["cls", "mean"]
    """How evaluations pool an encoder that was only pre-trained."""
    ct_pooling: Literal["cls", "mean"]
    """What the NNCLR head reads, and how evaluations pool a tuned encoder."""
    class_token: bool = True
    """Only some imported encoders (I-JEPA) have none; no stage trains them."""

    @property
    def patches(self) -> int:
        """Number of patch tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @model_validator(mode="after")
    def _divisible(self) -> "Encoder":
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        for part, width, heads in (
            ("width", self.width, self.heads),
            ("decoder_width", self.decoder_width, self.decoder_heads),
        ):
            if width % heads:
                raise ValueError(f"{part} {width} is not a multiple of its {heads} heads")
            if width % 4:
                raise ValueError(f"{part} {width} is not a multiple of 4 (sine-cosine positions)")
        return self


def visible_patches(patches: int, mask_ratio: float) -> int:
    """Patches left after masking, rounded down as in MAE."""
    return int(patches * (1 - mask_ratio))


class View(Settings):
    """How one view of an image is made: probabilities of each random change.

    Strengths are those of BYOL (`docs/data.md`); order: crop, flip, jitter, blur, gray, solarize.
    """

    crop_scale: tuple[float, float]
    flip: float = 0.5
    jitter: float = 0.0
    blur: float = 0.0
    gray: float = 0.0
    solarize: float = 0.0


# MAE: scale from 0.2; tuning and probing from 0.08; the aug variant follows BYOL's asymmetry.
AUGMENTATIONS: dict[str, tuple[View, View]] = {
    "mae": (View(crop_scale=(0.2, 1.0)),) * 2,
    "min": (View(crop_scale=(0.08, 1.0)),) * 2,
    "aug": (
        View(crop_scale=(0.08, 1.0), jitter=0.8, blur=1.0, gray=0.2),
        View(crop_scale=(0.08, 1.0), jitter=0.8, blur=0.1, gray=0.2, solarize=0.2),
    ),
}


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


class Contrastive(Settings):
    """The NNCLR head (paper, section 3 and A.2): shape, lookup and loss."""

    queue_size: int = Field(default=65536, gt=0)
    projector_hidden: int = Field(default=2048, gt=0)
    predictor_hidden: int = Field(default=4096, gt=0)
    embedding: int = Field(default=256, gt=0)
    temperature: float = Field(gt=0)
    topk: int = Field(ge=1)
    projector_ema: float = Field(ge=0, lt=1)
    """Momentum of the projector on the lookup path; 0 means the projector itself."""
    lookup: Literal["topk", "none", "oracle"] = "topk"
    """`none`: the other view itself is the positive; `oracle`: same-class neighbours only."""
    head_lr: float = Field(gt=0)
    head_weight_decay: float = Field(ge=0)


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
            _check_contrastive(self, self.head)
        return self


class Head(Stage):
    """Initialisation of the NNCLR head on the frozen encoder."""

    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Head":
        _check_contrastive(self, self.head)
        return self


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
        _check_contrastive(self, self.head)
        return self


class Import(Settings):
    """Instead of training: an encoder that others have trained (`docs/weights.md`)."""

    layout: (
        Literal["mae", "mae_ct", "layer_grafting", "moco_v3", "msn", "ijepa", "ibot", "dino"] | None
    ) = None
    """How the checkpoint is laid out; none: found from its content."""


def _check_contrastive(stage: Stage, head: Contrastive) -> None:
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


def one_line(error: ValidationError, where: str) -> UserError:
    """The first fault of a validation as one message with its place and, if near, its cure."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        model: Any = error.title
        known = _known_keys(str(model), fault["loc"])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return UserError(f"{where}: unknown key {key!r}; {cure}")
    message = fault["msg"].removeprefix("Value error, ")
    given = f" (given: {fault['input']!r})" if key and fault["type"] != "missing" else ""
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{given}")


def _known_keys(title: str, location: tuple[int | str, ...]) -> list[str]:
    """Keys that a settings class, found by its name, knows at `location`."""
    pending: list[type[Settings]] = [Settings]
    while pending:
        model = pending.pop()
        if model.__name__ == title:
            if len(location) > 1 and location[0] == "head":
                model = Contrastive
            return list(model.model_fields)
        pending.extend(model.__subclasses__())
    return []


def digest(*parts: Any) -> str:
    """Short hexadecimal identity of settings or JSON values, whatever the order of their keys."""
    plain = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
