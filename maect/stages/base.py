"""What a stage declares, and the settings that stages have in common; no torch at import."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.core.settings import Settings, later
from maect.recipes import AUGMENTATIONS, Contrastive, Encoder, View
from maect.recipes.flops import parameters

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective

Fraction = Annotated[float, Field(gt=0, le=1)]

EVERY_OTHER = "every other"
"""Stands in `starts_from` for all stages but the one itself."""
STATES = 3  # two are kept and one is being written


class Stage(Settings):
    """One way to make an encoder: its settings are the fields of the class.

    Attributes:
        name: of the stage, and of its rule.
        title: what a run of it is doing, for messages.
        starts_from: stages whose runs it may start from, or `EVERY_OTHER`; () starts from nothing.
        trains: whether it trains; else it only converts.
        keeps_state: whether a finished run keeps its last states.
        labelled: whether it learns from labels.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    starts_from: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True
    labelled: ClassVar[bool] = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Files that a finished run has beside `run.json`."""
        return ("encoder.safetensors",)

    def takes(self, source: "Stage") -> tuple[str, ...]:
        """Which of the files that a run of `source` leaves it reads."""
        return ("encoder.safetensors",) if self.starts_from else ()

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder that these settings do not fit.

        Raises:
            ValueError: with the numbers.
        """

    def check_source(self, encoder: Encoder, source: "Stage", source_encoder: Encoder) -> None:
        """Refuse a run to start from that does not fit.

        Raises:
            ValueError: what differs; the message goes on with " of RUN".
        """
        if source_encoder != encoder:
            raise ValueError("its encoder differs from that")

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        return 0.0

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a finished run leaves: what it exports, and its states if it keeps them."""
        return 4 * parameters(encoder)


COMPUTED = {
    "zero_stage": 1,
    "accumulation": 1,
    "compile": False,
    "activation_checkpointing": False,
    "attention": "sdpa",
}
"""How a training is computed, not what: it may change at any time, and changes nothing else.

Each stands for itself in digests with the default that it had when it was still a part of them.
"""


class Updates(Settings):
    """How the updates of a training are computed."""

    epochs: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Images in the global batch, over all ranks; each gives one view or more."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    precision: Literal["bf16", "fp32"] = "bf16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step. Batch statistics forbid it in contrastive stages."""
    compile: bool = False
    activation_checkpointing: bool = False

    @classmethod
    def decisive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """All but how it is computed."""
        return values | {key: value for key, value in COMPUTED.items() if key in values}

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that the batch does not split over.

        Raises:
            UserError: with the numbers.
        """
        if self.batch_size % (ranks * self.accumulation):
            parts = f"{ranks} ranks x accumulation {self.accumulation}"
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {parts}")


class Training(Updates, Stage):
    """Settings of every stage that trains."""

    attention: Literal["sdpa", "flash_attn"] = "sdpa"

    def images_of(self, images: int, classes: int) -> int:
        """Images of an epoch, of a training split with so many images and classes."""
        return images

    def total_steps(self, images: int) -> int:
        """Updates; batches straddle epochs, so nothing is dropped but the last rest."""
        return self.epochs * images // self.batch_size

    @property
    @abstractmethod
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""

    def lr_multiplier(self, step: int, steps: int) -> float:
        """Fraction of the peak learning rates in update `step` (from 0) of `steps`."""
        from maect.train.optimizer import schedule

        return schedule(step, steps, round(self.warmup * steps))

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average; None: no average."""
        return None

    @abstractmethod
    def view_settings(self) -> tuple[View, ...]:
        """How each view of an image is made."""

    def image_change(self, seed: int) -> "Change | None":
        """What happens to each decoded image before flip and colours, if anything."""
        return None

    def training_images(self, index: "Index") -> "Index":
        """The images to train on, out of a split.

        Raises:
            UserError: too few.
        """
        if index.n < self.batch_size:
            raise UserError(
                f"batch_size {self.batch_size} is larger than the train split's {index.n} images: "
                "an image would be in the same batch twice"
            )
        return index

    @abstractmethod
    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Objective":
        """The objective on the CPU, with weights from `seed` and from the run at `source`.

        Args:
            encoder: its shape.
            seed: of initial weights and of everything drawn in training.
            source: folder of the run to start from.
            classes: names of the classes of the training images.

        Raises:
            UserError: no source where one is needed, or one that does not fit.
        """

    @abstractmethod
    def parameter_groups(self, objective: "Objective") -> list[dict[str, Any]]:
        """Trainable parameters for AdamW (`maect.train.optimizer.grouped`)."""

    @abstractmethod
    def export(
        self,
        folder: Path,
        encoder: Encoder,
        reader: "StateReader",
        source: Path | None,
        index: "Index",
    ) -> dict[str, Any]:
        """Write the files that a run leaves, from its final state.

        Args:
            folder: of the run.
            encoder: its shape.
            reader: of the state.
            source: folder of the run that it started from.
            index: the images that it was trained on.

        Returns:
            What `run.json` says beside what it says of every run: `pooling` at least.
        """

    def need(self, source: Path | None) -> Path:
        """The run to start from.

        Raises:
            UserError: none is given.
        """
        if source is None:
            raise UserError(f"stage {self.name} needs a run to start from: none given")
        return source

    def _state(self, learnt: int, averaged: int, left: int) -> int:
        """Bytes of states (weights and AdamW's two moments in fp32; averages) and exports."""
        states = STATES if self.keeps_state else 0
        return states * (12 * learnt + 4 * averaged) + 4 * left


class SelfSupervised(Training):
    """Settings of the stages that learn without labels, from views of images."""

    augmentation: Literal["mae", "min", "aug"]
    crop_scale: tuple[float, float] | None = None
    """Replaces the augmentation's crop scale, for images whose object fills the frame."""
    flip: float | None = Field(default=None, ge=0, le=1)
    """Replaces the probability of a horizontal flip (0 where left and right mean something)."""
    blur: float | None = later(None, ge=0, le=1)
    """Replaces the probability of blur (0 where images have few pixels and it leaves nothing)."""
    warmup_fraction: float = Field(ge=0, lt=1)
    lr_counts_views: bool = True
    """lr = base_lr x batch_size x views / 256 (authors' code); False leaves `views` out."""
    views: int = Field(default=2, ge=1, le=2)
    mask_ratio: float = Field(default=0.0, ge=0, lt=1)
    head: Contrastive | None = None

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_fraction

    @property
    def leaves(self) -> tuple[str, ...]:
        """The encoder, and the NNCLR head where there is one."""
        return ("encoder.safetensors", *(["head.safetensors"] if self.head else []))

    def view_settings(self) -> tuple[View, ...]:
        """The augmentation's views with this run's crop scale, flips and blur."""
        changes = {"crop_scale": self.crop_scale, "flip": self.flip, "blur": self.blur}
        changes = {key: value for key, value in changes.items() if value is not None}
        return tuple(view.model_copy(update=changes) for view in AUGMENTATIONS[self.augmentation])[
            : self.views
        ]

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder without [CLS] token."""
        if not encoder.class_token:
            raise ValueError("an encoder without [CLS] token is not trained without labels")

    def parameter_groups(self, objective: "Objective") -> list[dict[str, Any]]:
        """The head's rates for the head, `encoder_rates` for everything else."""
        from maect.train.optimizer import grouped

        depth = len(objective.encoder.blocks)

        def rates(name: str) -> tuple[float, float]:
            part, _, inner = name.partition(".")
            if part == "head" and self.head is not None:
                return self.scaled_lr(self.head.head_lr), self.head.head_weight_decay
            return self.encoder_rates(inner if part == "encoder" else None, depth)

        return grouped(objective, rates)

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Learning rate and weight decay of a parameter of the encoder; None: of another part."""
        raise NotImplementedError

    def objective(self, encoder: Encoder, seed: int) -> "Objective":
        """The objective with random weights."""
        raise NotImplementedError

    def start_from(self, source: Path, objective: Any, encoder: Encoder) -> None:
        """Take over the encoder of the run in a folder."""
        from maect.stages.weights import load_source

        load_source(objective.encoder, encoder, source)

    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Objective":
        """The objective with random weights, and in their place what it takes from a run."""
        objective = self.objective(encoder, seed)
        if self.starts_from:
            self.start_from(self.need(source), objective, encoder)
        return objective

    def pooling(self, encoder: Encoder) -> Literal["cls", "mean"]:
        """How the tokens of the encoder that a run leaves are pooled."""
        return encoder.ct_pooling

    def export(
        self,
        folder: Path,
        encoder: Encoder,
        reader: "StateReader",
        source: Path | None,
        index: "Index",
    ) -> dict[str, Any]:
        """Write the encoder, or its running average, and the head where there is one."""
        from maect.stages.weights import export_encoder, export_head
        from maect.train.checkpoint import AVERAGE, PARAM

        pooling, kind = self.pooling(encoder), PARAM if self.encoder_average is None else AVERAGE
        export_encoder(folder, encoder, reader, source, pooling, kind)
        if self.head is not None:
            export_head(folder, self.head, encoder, reader)
        return {"pooling": pooling}

    def scaled_lr(self, base_lr: float) -> float:
        """Peak learning rate by the linear scaling rule (paper, A.1)."""
        return base_lr * self.batch_size * (self.views if self.lr_counts_views else 1) / 256

    def check_contrastive(self) -> Self:
        """Refuse what the contrastive loss cannot be computed with."""
        head = self.head
        if head is None:
            return self
        if self.views != 2:
            raise ValueError("the contrastive loss needs views: 2")
        if head.queue_size % self.batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide queue_size {head.queue_size}: "
                "the queue is filled in whole batches"
            )
        if head.topk > head.queue_size:
            raise ValueError(f"topk {head.topk} is larger than queue_size {head.queue_size}")
        if self.accumulation != 1:
            raise ValueError(
                "accumulation must be 1 in contrastive stages: batch statistics and negatives are "
                "those of the whole global batch"
            )
        return self


class Supervised(Updates):
    """Settings of training with labels (paper, B and E); defaults: MAE's rates for ViT-L."""

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
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    layer_decay: float = Field(default=0.75, gt=0, le=1)
    frozen_blocks: int = Field(default=0, ge=0)
    """The lowest so many blocks, with patch embedding and [CLS] token."""
    drop_path: float = Field(default=0.2, ge=0, lt=1)
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    """Over the blocks; linear starts from 0."""
    pooling: Literal["encoder", "cls", "mean", "fc_norm"] = "encoder"
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
    zero_stage: Literal[0, 1, 2] = 1

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
        super().check_ranks(ranks)
        share = self.batch_size // (ranks * self.accumulation)
        if self.mixes and share % 2:
            raise UserError(
                f"batch_size {self.batch_size}: Mixup and CutMix pair images, and {ranks} ranks x "
                f"accumulation {self.accumulation} leave {share} each, an odd number"
            )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr} is above the peak learning rate")
        return self

    def view_settings(self) -> tuple[View, ...]:
        """One view: crop and flip; the rest comes after decoding."""
        return (View(crop_scale=self.crop_scale, flip=self.flip),)
