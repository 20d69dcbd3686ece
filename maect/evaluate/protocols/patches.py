"""Protocols on patch tokens: segmentation of images whose every pixel has a class."""

from typing import ClassVar, Literal

from pydantic import Field

from maect.core.errors import UserError
from maect.evaluate.base import Count, Encodes, ImageCount, Input, Positive, Shards
from maect.evaluate.protocols.probes import ByUpdates
from maect.evaluate.protocols.stored_features import PENALTIES
from maect.recipes import Encoder


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
