"""Protocols that train probes on a frozen encoder, and their schedules; those on patches, too.

On patches: segmentation of images whose every pixel has a class.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.evaluate.base import Count, Encodes, ImageCount, Input, Positive, RealLabels, Shards
from maect.evaluate.protocols.stored_features import PENALTIES
from maect.recipes import CropScale, Encoder

if TYPE_CHECKING:
    from maect.data.index import Index


class TrainsProbe(Encodes):
    """Base of the protocols that train a probe on a frozen encoder."""

    writes_tensors: ClassVar[bool] = True

    batch_size: int = Field(default=1024, gt=0)
    seed: int = 0

    @abstractmethod
    def schedule(self, train: "Index") -> "UpdateSchedule":
        """Return the updates on these images; raise UserError if the images are too few."""


@dataclass(frozen=True)
class UpdateSchedule:
    """Number of updates of a probe.

    Attributes:
        steps: updates in all.
        ends: update counts at which an epoch ends and the state is saved.
        warmup: updates in which the learning rates rise.
    """

    steps: int
    ends: list[int]
    warmup: float


class OnCrops(TrainsProbe):
    """Settings of probes that learn from crops of the training images, flipped or not."""

    crop_scale: CropScale = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)


class ByEpochs(OnCrops):
    """Settings of probes that train for a number of epochs."""

    encodes_every_epoch: ClassVar[bool] = False
    """Whether the test images are encoded after each epoch, and not once."""

    epochs: int = Field(default=50, gt=0)
    warmup_epochs: float = Field(default=5, ge=0)

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        return self

    def encoded(self, images: ImageCount) -> float:
        """Count the training images once an epoch; and the test images, or those once."""
        tests = self.epochs if self.encodes_every_epoch else 1
        return self.epochs * images(self.train_split) + tests * images(self.test_split)

    def schedule(self, train: "Index") -> "UpdateSchedule":
        """Return the updates of whole batches; raise UserError if all epochs are less than one."""
        if self.epochs * train.n < self.batch_size:
            raise UserError(
                f"{train.directory}: {self.epochs} epochs of {train.n} images are less than one "
                f"batch of {self.batch_size}; lower batch_size"
            )
        steps, ends = epoch_ends(train.n, self.batch_size, self.epochs)
        return UpdateSchedule(steps, ends, self.warmup_epochs * train.n / self.batch_size)


class ByUpdates(TrainsProbe):
    """Settings of probes that train for a number of updates, whatever the number of images."""

    updates: int = Field(gt=0)
    warmup_updates: int = Field(ge=0)
    period: int = Field(gt=0)
    """Updates between saved states."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.warmup_updates >= self.updates:
            raise ValueError(f"warmup_updates {self.warmup_updates} of {self.updates} updates")
        return self

    def schedule(self, train: "Index") -> "UpdateSchedule":
        """Return the updates, an end after each period and after the last."""
        ends = [*range(self.period, self.updates, self.period), self.updates]
        return UpdateSchedule(self.updates, ends, self.warmup_updates)


class TrainsByLars(RealLabels, ByEpochs):
    """Settings of the leaderboard's trained probes."""

    encodes_every_epoch: ClassVar[bool] = True

    epochs: int = Field(default=90, gt=0)
    batch_size: int = Field(default=4096, gt=0)
    base_lr: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    warmup_epochs: float = Field(default=10, ge=0)
    weight_decay: float = Field(default=0, ge=0)
    """Weight decay of all trained tensors but the classifier's bias."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train the probe a second time without this part of the training images, and choose the epoch
    on them."""


def epoch_ends(images: int, batch: int, epochs: int) -> tuple[int, list[int]]:
    """Return the number of updates, and the update count at which each epoch is complete.

    Batches run on over the end of an epoch, so the update that completes it has begun the next
    one; the last epoch ends with the last full batch.
    """
    steps = epochs * images // batch
    return steps, [min(steps, -(-epoch * images // batch)) for epoch in range(1, epochs + 1)]


class LinearProbe(RealLabels, ByEpochs):
    """Linear probing (paper, table 9): ten learning rates, trained together."""

    name: ClassVar[str] = "linear_probe"
    title: ClassVar[str] = "linear probe"
    work: ClassVar[str] = "linear_probe.evaluate"
    test_data: ClassVar[str | None] = (
        "linear_probe is the best learning rate and epoch on the test split, as the authors' "
        "logger chooses; linear_probe_last takes the last epoch and the best learning rate on the "
        "test split"
    )

    learning_rates: tuple[Positive, ...] = Field(
        default=(0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01), min_length=1
    )
    momentum: float = 0.9
    concat: bool = False
    """Probe several forms instead: the last 1, 2, 4 and 6 blocks, [CLS] with mean, mean alone."""
    refiner: bool = False
    """Probe those of MIM-Refiner instead: the output, and the last four raw blocks, of both the
    [CLS] token, alone and with the mean of the patch tokens."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train every probe a second time without this part of the training images, and choose form,
    rate and epoch on them."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.concat and self.refiner:
            raise ValueError("concat and refiner are two choices of forms; leave one out")
        return self


class EfficientProbe(TrainsByLars):
    """Attentive probe on the patch tokens: multi-query cross-attention, trained with LARS."""

    name: ClassVar[str] = "efficient_probe"
    title: ClassVar[str] = "efficient probe"
    work: ClassVar[str] = "lars_probes.evaluate_efficient"
    test_data: ClassVar[str | None] = (
        "efficient_probe is the best epoch on the test split, as the authors report it; "
        "efficient_probe_last is the last one"
    )

    queries: int = Field(default=32, gt=0)


class LarsLinearProbe(TrainsByLars):
    """Linear probe trained with LARS, of the leaderboard for frozen encoders."""

    name: ClassVar[str] = "lars_linear_probe"
    title: ClassVar[str] = "linear probe by LARS"
    work: ClassVar[str] = "lars_probes.evaluate_linear"
    test_data: ClassVar[str | None] = (
        "lars_linear_probe is the best epoch on the test split, as the leaderboard reports it; "
        "lars_linear_probe_last is the last one"
    )


class AttentiveProbe(RealLabels, ByUpdates, OnCrops):
    """Linear and attentive probes of many rates and decays, chosen on held-out training images."""

    name: ClassVar[str] = "attentive_probe"
    title: ClassVar[str] = "attentive probe"
    work: ClassVar[str] = "attentive_probe.evaluate"
    test_data: ClassVar[str | None] = "only scored, by what held-out training images chose"

    precision: Literal["fp32", "bf16"] = "fp32"
    updates: int = Field(default=12_500, gt=0)
    warmup_updates: int = Field(default=1250, ge=0)
    period: int = Field(default=1250, gt=0)
    learning_rates: tuple[Positive, ...] = Field(
        default=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2), min_length=1
    )
    """Multiplied by batch_size / 256."""
    weight_decays: tuple[float, ...] = Field(default=(5e-4, 1e-3, 5e-2), min_length=1)
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Part of the training images that chooses."""
    head_width: int = Field(default=64, gt=0)
    """Channels of each head of the attention."""

    def encoded(self, images: ImageCount) -> float:
        """Count the batches, the held-out images and the test images."""
        seen = self.updates * self.batch_size + self.held_out * images(self.train_split)
        return seen + images(self.test_split)


class ColorHistogram(ByEpochs):
    """Probes on every block that predict the image's colour histogram (paper, figure 5 and B)."""

    name: ClassVar[str] = "color_histogram"
    title: ClassVar[str] = "colour histograms"
    work: ClassVar[str] = "color_histogram.evaluate"
    test_data: ClassVar[str | None] = "only scored, after the last epoch"
    labelled: ClassVar[bool] = False

    epochs: int = Field(default=10, gt=0)
    pooling: Literal["cls", "mean"] = "cls"
    """Pooling of each block: [CLS], as in the paper, or the mean of the patch tokens, for encoders
    whose contrastive head read that."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    momentum: float = 0.9
    warmup_epochs: float = Field(default=1, ge=0)
    probes: int = Field(default=1, gt=0)
    """Probes of each block that differ only in their initial weights: their agreement is
    measured."""

    def headline(self) -> dict[str, str]:
        """Errors of the last block and the mean of all."""
        blocks = {"error_last": "last block", "error_mean": "mean of blocks"}
        return {key: f"error of {self.title}, {of}" for key, of in blocks.items()}


class Masked(Encodes):
    """Base of the protocols on images whose every pixel has a class."""

    labelled: ClassVar[bool] = False  # masks say what is where

    precision: Literal["fp32", "bf16"] = "fp32"
    train_masks: str = "train_masks"
    test_masks: str = "val_masks"
    ignore: tuple[int, ...] = (0, 255)
    """Numbers in masks that count as no class: ADE20K's. VOC's background is a class: [255]."""
    seed: int = 0
    """Seed of the choice of held-out images."""

    def inputs(self) -> dict[str, Input]:
        """Images and masks of both splits."""
        return {
            "train": Shards(self.train_split),
            "train_masks": Shards(self.train_masks),
            "test": Shards(self.test_split),
            "test_masks": Shards(self.test_masks),
        }


class PatchClassifier(Masked):
    """Base of the protocols that classify patches; settings are chosen on held-out images."""

    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose settings on."""
    patches_one_in: int = Field(default=1, gt=0)
    """Learn from every Nth training patch alone, to save time."""

    def encoded(self, images: ImageCount) -> float:
        """Count both splits once."""
        return images(self.train_split) + images(self.test_split)


class PatchKnn(PatchClassifier):
    """Segmentation by the nearest training patches."""

    name: ClassVar[str] = "patch_knn"
    title: ClassVar[str] = "k-nearest neighbours of patches"
    work: ClassVar[str] = "patch_classifiers.evaluate_knn"
    minutes: ClassVar[float] = 30.0

    neighbours: tuple[Count, ...] = (1, 3, 10, 30)
    distances: tuple[Literal["cosine", "l2"], ...] = ("cosine", "l2")


class PatchLogistic(PatchClassifier):
    """Segmentation by a logistic regression on patches."""

    name: ClassVar[str] = "patch_logistic"
    title: ClassVar[str] = "logistic regression on patches"
    work: ClassVar[str] = "patch_classifiers.evaluate_logistic"
    minutes: ClassVar[float] = 60.0

    penalties: tuple[Positive, ...] = Field(default=PENALTIES, min_length=1)
    """C: weight of the summed loss relative to half the squared weights, as in scikit-learn."""
    max_iterations: Count = 1000
    tolerance: float = Field(default=1e-12, ge=0)
    """Largest component of the gradient at which the solver stops."""


class PatchLinear(Masked, ByUpdates):
    """Segmentation by a linear head on patch tokens."""

    name: ClassVar[str] = "patch_linear"
    title: ClassVar[str] = "linear head on patches"
    work: ClassVar[str] = "patch_linear.evaluate"
    test_data: ClassVar[str | None] = (
        "patch_linear is the best of the scores during the training on the test split, as the "
        "authors report it; patch_linear_last is the last one, patch_linear_held_out chooses on "
        "training images"
    )

    updates: int = Field(default=40_000, gt=0)
    warmup_updates: int = Field(default=1500, ge=0)
    period: int = Field(default=5000, gt=0)
    """Updates between scores of the test images, with which the state is saved."""
    batch_size: int = Field(default=16, gt=0)
    size: int = Field(default=512, gt=0)
    """Side of crops and windows, and shorter side of images, in pixels."""
    stride: int = Field(default=341, gt=0)
    """Pixels between windows."""
    ratios: tuple[float, float] = (0.5, 2.0)
    """Range of the factor on the shorter side of training images."""
    flip: float = Field(default=0.5, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-3, ge=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train the head a second time without this part of the training images, and choose on them
    when to stop."""

    def flops(self, encoder: Encoder, images: ImageCount) -> float | None:
        """Count them of crops and test images as if these were square."""
        return super().flops(encoder.model_copy(update={"image_size": self.size}), images)

    def encoded(self, images: ImageCount) -> float:
        """Count the crops, and the test images after each period."""
        scored = -(-self.updates // self.period) * images(self.test_split)
        return self.updates * self.batch_size + scored

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that does not divide the batch."""
        if self.batch_size % ranks:
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {ranks} ranks")
