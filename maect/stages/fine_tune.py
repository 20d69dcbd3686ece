"""Supervised fine-tuning."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.core.settings import Settings
from maect.recipes import Encoder, View
from maect.recipes.flops import parameters, view_flops
from maect.stages.base import EVERY_OTHER, Training

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.stages.objectives import Classifier
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective

Fraction = Annotated[float, Field(gt=0, le=1)]


class Recipe(Settings):
    """How fine-tuning trains (paper, B and E); defaults: MAE's recipe for ViT-L."""

    fraction: Fraction = 1.0
    """Of the labels of every class."""
    subsets: str | None = None
    """Folder of the official lists (`maect retrieve`); none: seeded subsets."""

    epochs: int = Field(default=50, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    base_lr: float = Field(default=1e-3, gt=0)
    """Multiplied by batch_size / 256."""
    min_lr: float = Field(default=1e-6, ge=0)
    """Where the cosine ends, for the uppermost layers."""
    warmup_epochs: float = Field(default=5, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    layer_decay: float = Field(default=0.75, gt=0, le=1)
    frozen_blocks: int = Field(default=0, ge=0)
    """The lowest so many blocks, with patch embedding and [CLS] token."""
    drop_path: float = Field(default=0.2, ge=0, lt=1)
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    """Over the blocks; linear starts from 0."""
    pooling: Literal["encoder", "cls", "mean", "fc_norm"] = "fc_norm"
    """`encoder`: as in its file; `fc_norm`: a new norm on the mean of un-normed patches (MAE)."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    mixup: float = Field(default=0.8, ge=0)
    """Parameter of Mixup's beta distribution; 0: no Mixup."""
    cutmix: float = Field(default=1.0, ge=0)
    """Likewise of CutMix; with both, each batch gets one of them at random."""
    random_erasing: float = Field(default=0.25, ge=0, le=1)
    """Probability for an image."""
    randaugment_layers: int = Field(default=2, ge=0)
    """Operations on an image; 0: no RandAugment."""
    randaugment_magnitude: float = Field(default=9.0, ge=0, le=10)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    precision: Literal["fp32", "bf16"] = "bf16"
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step."""
    zero_stage: Literal[0, 1, 2] = 1
    activation_checkpointing: bool = False
    compile: bool = False

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return bool(self.mixup or self.cutmix)

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the classifier."""
        return self.base_lr * self.batch_size / 256

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that the batch does not split over.

        Raises:
            UserError: with the numbers.
        """
        share, rest = divmod(self.batch_size, ranks * self.accumulation)
        parts = f"{ranks} ranks x accumulation {self.accumulation}"
        if rest:
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {parts}")
        if self.mixes and share % 2:
            raise UserError(
                f"batch_size {self.batch_size}: Mixup and CutMix pair images, and {parts} leave "
                f"{share} each, an odd number"
            )

    @model_validator(mode="after")
    def _possible(self) -> "Recipe":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr} is above the peak learning rate")
        return self


class FineTune(Recipe, Training):  # type: ignore[misc]  # zero_stage without 3
    """Supervised fine-tuning of an encoder on all labels or few: one training."""

    name: ClassVar[str] = "fine_tune"
    title: ClassVar[str] = "Fine-tuning {run}"
    starts_from: ClassVar[tuple[str, ...]] = (EVERY_OTHER,)

    shots: int = Field(default=0, ge=0)
    """So many labels per class instead of a fraction; 0: a fraction."""
    split: int = Field(default=1, gt=0)
    """Which of the subsets with so many shots."""
    subset_seed: int = 0
    """Seed of the subset where no lists are given."""

    @model_validator(mode="after")
    def _consistent(self) -> "FineTune":
        if self.shots and self.fraction < 1:
            raise ValueError("shots and fraction: leave out one of them")
        return self

    @property
    def leaves(self) -> tuple[str, ...]:
        """The encoder, and its classifier."""
        return ("encoder.safetensors", "head.safetensors")

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_epochs / self.epochs

    def lr_multiplier(self, step: int, steps: int) -> float:
        """Fraction of the peak learning rates: linear warm-up, then cosine to `min_lr`."""
        fraction = super().lr_multiplier(step, steps)
        if step < round(self.warmup * steps):
            return fraction
        lowest = self.min_lr / self.peak_lr
        return lowest + (1 - lowest) * fraction

    def view_settings(self) -> tuple[View, ...]:
        """One view: crop and flip; the rest comes after decoding."""
        return (View(crop_scale=self.crop_scale, flip=self.flip),)

    def images_of(self, images: int, classes: int) -> int:
        """Images of an epoch, of a training split with so many images and classes."""
        return self.shots * classes if self.shots else round(self.fraction * images)

    def image_change(self, seed: int) -> "Change | None":
        """RandAugment."""
        from maect.data.transforms import randaugment

        return randaugment(self.randaugment_layers, self.randaugment_magnitude, seed)

    def training_images(self, index: "Index") -> "Index":
        """The labelled images: all, a fraction, or so many of each class.

        Raises:
            UserError: images without labels, too few classes, or too few images.
        """
        from maect.data.labelled import Labelled, fraction_rows_of, shots_rows

        if index.n == 0 or index.labels.min() < 0:
            raise UserError(f"{index.directory}: fine-tuning needs labels; some images have none")
        if len(index.class_names) < 2:
            raise UserError(f"{index.directory}: fine-tuning needs at least two classes")
        labelled = Labelled(index.directory, index.labels, index.keys, index.class_names)
        if self.shots:
            rows = shots_rows(labelled, self.shots, self.split, self.subset_seed, self.subsets)
        else:
            rows = fraction_rows_of(labelled, self.fraction, self.subset_seed, self.subsets)
        if len(rows) < self.batch_size:
            raise UserError(
                f"{index.directory}: batch_size {self.batch_size} is larger than its "
                f"{len(rows)} labelled images: an image would be in the same batch twice"
            )
        return replace(index, rows=index.rows[rows])

    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Classifier":
        """Put a classifier on the encoder of a run."""
        from maect.models.weights import load_encoder_weights
        from maect.stages.objectives import Classifier

        vit, _, pooling = load_encoder_weights(self.need(source) / "encoder.safetensors")
        return Classifier(self, vit, len(classes), pooling, seed)

    def parameter_groups(self, objective: "Objective") -> list[dict[str, Any]]:
        """Layer-wise decay in the encoder, the peak itself for norm and classifier."""
        from maect.train.optimizer import grouped, layer_scale

        depth = len(objective.encoder.blocks)

        def rates(name: str) -> tuple[float, float]:
            part, _, inner = name.partition(".")
            scale = layer_scale(inner, depth, self.layer_decay) if part == "encoder" else 1.0
            return self.peak_lr * scale, self.weight_decay

        return grouped(objective, rates)

    def export(
        self,
        folder: Path,
        encoder: Encoder,
        reader: "StateReader",
        source: Path | None,
        index: "Index",
    ) -> dict[str, Any]:
        """Write the encoder and its classifier; `run.json` says which images were labelled."""
        from maect.data.labelled import subset_record
        from maect.models.weights import save_encoder, save_tensors
        from maect.train.checkpoint import PARAM

        objective = self.build(encoder, 0, source, index.class_names)
        weights = objective.encoder.state_dict() | reader.part(
            PARAM, "encoder.", objective.encoder.state_dict()
        )
        norm = reader.part(PARAM, "fc_norm.", objective.fc_norm.state_dict())
        weights |= {f"fc_norm.{name}": value for name, value in norm.items()}
        save_encoder(folder / "encoder.safetensors", weights, encoder, objective.pooling)
        classifier = reader.part(PARAM, "head.", objective.head.state_dict())
        save_tensors(
            folder / "head.safetensors", classifier, {"classes": json.dumps(index.class_names)}
        )
        return {"pooling": objective.pooling, "subset": subset_record(index)}

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse to freeze more blocks than there are."""
        if self.frozen_blocks > encoder.depth:
            raise ValueError(
                f"frozen_blocks {self.frozen_blocks}: the encoder has {encoder.depth} blocks"
            )

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward, per image."""
        return view_flops(encoder, encoder.prefix_tokens + encoder.patches, self.frozen_blocks)

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a run leaves: its states and the files that it exports."""
        body = parameters(encoder)
        return self._state(body, 0, body)
