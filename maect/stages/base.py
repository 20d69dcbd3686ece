"""The settings that stages have in common; no torch at import.

A stage without labels overrides `objective`, `encoder_rates`, `trained_blocks` and, with heads of
its own, `head_settings`. The trainer's side (memory, batches, rates) is `maect/train/stage.py`.
"""

import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.recipes import (
    AUGMENTATIONS,
    Contrastive,
    CropScale,
    Encoder,
    HeadSettings,
    View,
    views_by_size,
    visible_patches,
)
from maect.recipes.cost import Cost, HeadInputs, encoder_cost, head_cost, view_groups
from maect.recipes.few_labels import FewLabels
from maect.recipes.settings import PLAIN, Computing
from maect.records import ENCODER
from maect.train.stage import RunInputs, Stage, Training, Updates, layer_scale

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.models.heads import QueueHead
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective

RANDOM = ("flip", "jitter", "blur", "gray", "solarize")
"""Fields of `View` that are probabilities."""


def head_file(name: str) -> str:
    """Return the name of the file to which a run exports a head."""
    return f"{name}.safetensors"


class WithoutLabels(Training):
    """Settings of the stages that learn without labels, from views of images.

    Their objective has named parts: `encoder`, parts that a stage adds, and any number of heads,
    whose settings are in `head_settings`. Learning rate, cost and file of each head, and that a run
    takes it over from another one, are defined here for all stages.

    Attributes:
        continues_heads: whether a run starts with the heads of the run that it starts from.
    """

    continues_heads: ClassVar[bool] = False

    augmentation: Literal["mae", "min", "aug"]
    crop_scale: CropScale | None = None
    """Replaces the augmentation's crop scale, for images whose object fills the frame."""
    flip: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of a horizontal flip (0 where left and right differ in meaning)."""
    blur: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of blur (0 for images of few pixels)."""
    jitter: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of jittered colours."""
    gray: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of a grey image."""
    solarize: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of solarized views."""
    lr_counts_views: bool = True
    """lr = base_lr x batch_size x views / 256 (authors' code); False leaves `views` out."""
    views: int = Field(default=2, ge=1)
    """Views of an image; the augmentation defines a pair, which further views repeat in turn."""
    mask_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the patches that the encoder does not see."""

    @property
    def head_settings(self) -> Mapping[str, HeadSettings]:
        """Settings of the heads, by the name of each in the objective: `head`, `heads.3`."""
        return {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that a finished run has: the encoder, and one for each head."""
        return ("encoder.safetensors", *map(head_file, self.head_settings))

    def inputs(self, source: Stage) -> tuple[str, ...]:
        """Return the encoder's file, and those of the heads that this stage continues."""
        return (*super().inputs(source), *map(head_file, self._continued_heads(source)))

    def _continued_heads(self, source: Stage) -> list[str]:
        """Return the names of the heads that a run takes over from a run of `source`."""
        if not (self.continues_heads and isinstance(source, WithoutLabels)):
            return []
        return [name for name in self.head_settings if name in source.head_settings]

    def check_source(self, encoder: Encoder, source: Stage, source_encoder: Encoder) -> None:
        """Refuse another encoder, and heads of other shapes."""
        super().check_source(encoder, source, source_encoder)
        for name in self._continued_heads(source):
            ours, theirs = self.head_settings[name], cast(WithoutLabels, source).head_settings[name]
            for key in ours.shape:
                if getattr(ours, key) != getattr(theirs, key, None):
                    here, there = getattr(ours, key), getattr(theirs, key, None)
                    raise ValueError(f"{name}.{key} {here} differs from {there}")

    def view_settings(self) -> tuple[View, ...]:
        """Return the augmentation's views with this run's crop scale and probabilities."""
        given = {key: getattr(self, key) for key in ("crop_scale", *RANDOM)}
        changes = {key: value for key, value in given.items() if value is not None}
        pair = [view.model_copy(update=changes) for view in AUGMENTATIONS[self.augmentation]]
        return tuple(pair[number % len(pair)] for number in range(self.views))

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder without [CLS] token, and views that do not fit it (ValueError)."""
        encoder.check_trainable()
        views = self.view_settings()
        changes = [name for name in ("jitter", "gray") if any(getattr(v, name) for v in views)]
        if changes and encoder.pixels.channels != 3:
            raise ValueError(
                f"{' and '.join(changes)} change colours, of images with 3 channels and not "
                f"{encoder.pixels.channels}; take an augmentation without them (min)"
            )
        if not encoder.class_token:
            raise ValueError("an encoder without [CLS] token is not trained without labels")
        sizes = views_by_size(views, encoder.image_size)
        for size in sizes:
            if size % encoder.patch_size:
                raise ValueError(
                    f"views of {size} pixels: not a multiple of patch_size {encoder.patch_size}"
                )
        if self.mask_ratio and len(sizes) > 1:
            raise ValueError("mask_ratio: views of several sizes are not masked")
        visible = visible_patches(encoder.patches, self.mask_ratio)
        if self.mask_ratio and not 0 < visible < encoder.patches:
            raise ValueError(
                f"mask_ratio {self.mask_ratio} leaves {visible} of the {encoder.patches} patches "
                "visible"
            )

    def trained_blocks(self, encoder: Encoder) -> int:
        """Return the number of the encoder's last blocks that learn."""
        return encoder.depth if self.trains_encoder else 0

    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Return the cost of the encoder, then of each head."""
        groups = view_groups(encoder, self.view_settings(), self.mask_ratio)
        trained = self.trained_blocks(encoder)
        learns = self.reaches_encoder and trained > 0
        passes = self.passes(computing)
        given = HeadInputs(passes, encoder.width, groups, self.batch_size, learns)
        heads = {name: head_cost(head, given) for name, head in self.head_settings.items()}
        return {"encoder": encoder_cost(passes, encoder, groups, trained), **heads}

    @property
    def whole_batch(self) -> bool:
        """Return whether there are heads, which need the statistics of the global batch."""
        return bool(self.head_settings)

    @property
    def reads_labels(self) -> bool:
        """Return whether labels are read: only by the oracle lookup of a head."""
        return any(head.needs_labels for head in self.head_settings.values())

    @property
    def reaches_encoder(self) -> bool:
        """Return whether the heads' gradient reaches the encoder."""
        return True

    def rates(self, name: str, depth: int) -> tuple[float, float]:
        """Return each head's own rates for its parameters, else `encoder_rates`."""
        for part, head in self.head_settings.items():
            if name.startswith(f"{part}."):
                return self.scaled_lr(head.head_lr), head.head_weight_decay
        part, _, inner = name.partition(".")
        return self.encoder_rates(inner if part == "encoder" else None, depth)

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Return peak learning rate and weight decay of a parameter of the encoder.

        Args:
            name: of the parameter in the encoder; None: it is in another part that is no head.
            depth: blocks of the encoder.
        """
        if self.trains_encoder:
            raise NotImplementedError
        return 0.0, 0.0

    def objective(self, encoder: Encoder, seed: int) -> "Objective":
        """Return the objective with random weights."""
        raise NotImplementedError

    def start_from(self, source: Path, objective: Any, encoder: Encoder) -> None:
        """Load the encoder of the run in a folder and, if the stage continues heads, its heads.

        The EMA projector of a head starts at its projector.

        Raises:
            UserError: encoder or head has another shape.
        """
        from maect.models.weights import load_encoder_weights, load_tensors

        module, settings, pooling = load_encoder_weights(source / ENCODER)
        for key in encoder.shape:
            here, there = getattr(encoder, key), getattr(settings, key)
            if here != there:
                raise UserError(f"{source}: its encoder has {key} {there}, this run has {here}")
        objective.encoder.load_state_dict(module.state_dict())
        if not self.trains_encoder:
            objective.export_pooling = pooling  # the export is a copy
        if not self.continues_heads:
            return
        for name in self.head_settings:
            file = source / head_file(name)
            if not file.exists():
                continue
            try:
                objective.get_submodule(name).take_over(load_tensors(file)[0])
            except ValueError as error:
                raise UserError(
                    f"{file}: {error}: its head settings differ from those of the run it starts "
                    "from"
                ) from None

    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Objective":
        """Return the objective, with weights of the run to start from if there is one."""
        objective = self.objective(encoder, seed)
        if self.needs_source:
            self.start_from(self.need(source), objective, encoder)
        return objective

    def export_pooling(self, encoder: Encoder) -> Literal["cls", "mean"]:
        """Return how the tokens of the encoder that a run exports are pooled."""
        return encoder.ct_pooling

    def export(self, run: RunInputs, reader: "StateReader", index: "Index") -> dict[str, Any]:
        """Write the encoder, or its running average, and each head; see `Training.export`."""
        import torch

        from maect.models.vit import build_encoder
        from maect.models.weights import load_encoder_weights, save_encoder, save_tensors
        from maect.train.checkpoint import AVERAGE, PARAM

        if self.head_settings:
            with torch.device("meta"):
                objective = self.objective(run.encoder, 0)
        for name, settings in self.head_settings.items():
            about = {"head": settings.header, "width": str(run.encoder.width)}
            exported = cast("QueueHead", objective.get_submodule(name)).exported()
            values = reader.part(PARAM, f"{name}.", exported)
            save_tensors(run.folder / head_file(name), values, about)
        target = run.folder / ENCODER
        if not self.trains_encoder:
            with atomic_write(target) as temporary:
                shutil.copyfile(self.need(run.source) / ENCODER, temporary)
            return {"pooling": load_encoder_weights(target)[2]}
        pooling = self.export_pooling(run.encoder)
        # What is not trained is as in the source.
        if run.source is None:
            weights = build_encoder(run.encoder).state_dict()
        else:
            weights = load_encoder_weights(run.source / ENCODER)[0].state_dict()
        kind = PARAM if self.encoder_average is None else AVERAGE
        weights |= reader.part(kind, "encoder.", weights)
        save_encoder(target, weights, run.encoder, pooling)
        return {"pooling": pooling}

    def scaled_lr(self, base_lr: float) -> float:
        """Return the peak learning rate by the linear scaling rule (paper, A.1)."""
        views = self.views if self.lr_counts_views else 1
        return base_lr * self.batch_size * views / 256

    def training_images(self, index: "Index") -> "Index":
        """Return all images of a split; UserError: too few, or an oracle without labels."""
        images = super().training_images(index)
        if self.reads_labels and images.labels.min() < 0:
            raise UserError(f"{index.directory}: an oracle needs labels; some images have none")
        return images

    @model_validator(mode="after")
    def _contrastive(self) -> Self:
        """Refuse settings with which the contrastive loss cannot be computed."""
        if self.head_settings and self.views != 2:
            raise ValueError("the contrastive loss needs views: 2")
        for name, head in self.head_settings.items():
            first, *_ = self.head_settings
            for key in head.drawn:
                here, there = getattr(head, key), getattr(self.head_settings[first], key, None)
                if here != there:
                    raise ValueError(
                        f"{name}.{key} {here} differs from {first}.{key} {there}: one number is "
                        "drawn for the lookups of all heads"
                    )
            if head.queue_size % self.batch_size:
                raise ValueError(
                    f"batch_size {self.batch_size} does not divide queue_size {head.queue_size}: "
                    "the queue is filled in whole batches"
                )
        return self


class SelfSupervised(WithoutLabels):
    """Settings of the stages with the paper's schedule and, if any, an NNCLR head."""

    warmup_fraction: float = Field(ge=0, lt=1)
    head: Contrastive | None = None

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_fraction

    @property
    def head_settings(self) -> Mapping[str, HeadSettings]:
        """Settings of the head, if there is one."""
        return {} if self.head is None else {"head": self.head}


class UpperLayers(Training):
    """Settings of the stages that train the encoder of a run: lower layers less, or not at all."""

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    layer_decay: float = Field(gt=0, le=1)
    frozen_blocks: int = Field(ge=0)
    """Number of first blocks that do not learn, nor do patch embedding and [CLS] token."""

    @property
    @abstractmethod
    def peak_lr(self) -> float:
        """Peak learning rate of the uppermost layers of the encoder."""

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse to freeze every block (ValueError)."""
        super().check_encoder(encoder)
        if self.frozen_blocks >= encoder.depth:
            raise ValueError(
                f"frozen_blocks {self.frozen_blocks} leaves none of the "
                f"{encoder.depth} blocks to {self.name}"
            )

    def trained_blocks(self, encoder: Encoder) -> int:
        """Return the number of blocks that are not frozen."""
        return encoder.depth - self.frozen_blocks

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Return learning rate and weight decay: the lower the layer, the lower the rate."""
        scale = 1.0 if name is None else layer_scale(name, depth, self.layer_decay)
        return self.peak_lr * scale, self.weight_decay


class Supervised(Updates, FewLabels):
    """Settings of training with labels (paper, B and E); defaults: MAE's rates for ViT-L."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the labels of every class."""

    epochs: int = Field(default=50, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    base_lr: float = Field(default=1e-3, gt=0)
    """Multiplied by batch_size / 256."""
    min_lr: float = Field(default=1e-6, ge=0)
    """Learning rate of the uppermost layers at which the cosine ends."""
    warmup_epochs: float = Field(default=5, ge=0)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    layer_decay: float = Field(default=0.75, gt=0, le=1)
    frozen_blocks: int = Field(default=0, ge=0)
    """Number of first blocks that do not learn, nor do patch embedding and [CLS] token."""
    drop_path: float = Field(default=0.2, ge=0, lt=1)
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    """Rates over the blocks; `linear` rises from 0."""
    pooling: Literal["encoder", "cls", "mean", "fc_norm"] = "encoder"
    """`encoder`: as in its file; `fc_norm`: a new norm on the mean of un-normed patches (MAE)."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    mixup: float = Field(default=0.8, ge=0)
    """Parameter of Mixup's beta distribution; 0: no Mixup."""
    cutmix: float = Field(default=1.0, ge=0)
    """Parameter of CutMix's beta distribution; with both, each batch gets one of them at random."""
    random_erasing: float = Field(default=0.25, ge=0, le=1)
    """Probability for an image."""
    randaugment_layers: int = Field(default=2, ge=0)
    """Number of operations on an image; 0: no RandAugment."""
    randaugment_magnitude: float = Field(default=9.0, ge=0, le=10)
    crop_scale: CropScale = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)

    @property
    def mixes(self) -> bool:
        """Return whether images are mixed in pairs."""
        return bool(self.mixup or self.cutmix)

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the classifier."""
        return self.base_lr * self.batch_size / 256

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr} is above the peak learning rate")
        return self

    def view_settings(self) -> tuple[View, ...]:
        """Return one view, cropped and flipped; other changes come after decoding."""
        return (View(crop_scale=self.crop_scale, flip=self.flip),)
