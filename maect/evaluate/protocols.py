"""Protocols: settings, inputs, cost and titles of each; torch-free, as rules and plans read them.

`work` names what computes the metrics. A protocol may as well define `evaluate` itself, in a module
of its own, and import there what it needs.
"""

import itertools
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from maect.core.errors import UserError, counted
from maect.core.settings import ContentPath, Settings
from maect.evaluate.agreement import Agreement
from maect.evaluate.base import (
    Count,
    Encodes,
    Fraction,
    ImageCount,
    Input,
    OutputOf,
    Positive,
    Protocol,
    ReadsFeatures,
    Shards,
    Trained,
)
from maect.recipes import KNN_K, KNN_TEMPERATURE, Encoder
from maect.recipes.few_labels import FewLabels, fraction_list, fraction_name, shots_list
from maect.stages.base import Supervised
from maect.stages.fine_tune import FineTune

if TYPE_CHECKING:
    from maect.data.index import Index

PENALTIES: tuple[float, ...] = tuple(round(10 ** (-6 + 11 * i / 7), 12) for i in range(8))
"""10 to the powers from -6 to 5, in seven equal steps (CAPI)."""
SHRINKAGES = (0.0, 0.01, 0.1)
REMOVED = (1, 2, 4, 8)
TWIN = "_held_out"
"""Behind the name of a run, of the one that is trained without the held-out images."""


class RealLabels(Settings):
    """Settings of protocols that can also score by ImageNet-ReaL's labels."""

    real_labels: ContentPath | None = None
    """ReaL's `real.json`: a list of classes for each of ImageNet's 50,000 validation images."""

    @property
    def labels_file(self) -> Path | None:
        """Return where the labels are; None if they are not asked for."""
        if self.real_labels is None:
            return None
        return Path(os.path.expandvars(self.real_labels)).expanduser()


class TrainsProbe(Encodes):
    """Base of the protocols that train a probe on a frozen encoder."""

    writes_tensors: ClassVar[bool] = True

    batch_size: int = Field(default=1024, gt=0)
    seed: int = 0

    @abstractmethod
    def schedule(self, train: "Index") -> "Schedule":
        """Return how many updates there are of the images learnt from; a UserError if too few."""


@dataclass(frozen=True)
class Schedule:
    """Number of updates.

    Attributes:
        steps: of them in all.
        ends: after how many of them each epoch ends, whereafter the state is saved.
        warmup: in how many of them the learning rates rise.
    """

    steps: int
    ends: list[int]
    warmup: float


class OnCrops(TrainsProbe):
    """Settings of probes that learn from crops of the training images, flipped or not."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)


class ByEpochs(OnCrops):
    """Settings of probes that train for a number of epochs."""

    encodes_every_epoch: ClassVar[bool] = False
    """Whether the test images are encoded after each epoch, and not once."""

    epochs: int = Field(default=50, gt=0)
    warmup_epochs: float = Field(default=5, ge=0)

    def encoded(self, images: ImageCount) -> float:
        """Count the training images once an epoch; and the test images, or those once."""
        tests = self.epochs if self.encodes_every_epoch else 1
        return self.epochs * images(self.train_split) + tests * images(self.test_split)

    def schedule(self, train: "Index") -> "Schedule":
        """Return the updates of whole batches; a UserError if all epochs are less than one."""
        if self.epochs * train.n < self.batch_size:
            raise UserError(
                f"{train.directory}: {self.epochs} epochs of {train.n} images are less than one "
                f"batch of {self.batch_size}; lower batch_size"
            )
        steps, ends = epoch_ends(train.n, self.batch_size, self.epochs)
        return Schedule(steps, ends, self.warmup_epochs * train.n / self.batch_size)


class ByUpdates(TrainsProbe):
    """Settings of probes that train for a number of updates, whatever the number of images."""

    updates: int = Field(gt=0)
    warmup_updates: int = Field(ge=0)
    period: int = Field(gt=0)
    """After how many updates the state is saved."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.warmup_updates >= self.updates:
            raise ValueError(f"warmup_updates {self.warmup_updates} of {self.updates} updates")
        return self

    def schedule(self, train: "Index") -> "Schedule":
        """Return the updates, an end after each period and after the last."""
        ends = [*range(self.period, self.updates, self.period), self.updates]
        return Schedule(self.updates, ends, self.warmup_updates)


class Masked(Encodes):
    """Base of the protocols on images whose every pixel has a class."""

    labelled: ClassVar[bool] = False  # masks say what is where

    precision: Literal["fp32", "bf16"] = "fp32"
    train_masks: str = "train_masks"
    test_masks: str = "val_masks"
    ignore: tuple[int, ...] = (0, 255)
    """Numbers in masks that count as no class: ADE20K's. VOC's background is a class: [255]."""
    seed: int = 0
    """Of the images that are held out."""

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
    """Learn from every so many-th training patch alone, which takes less time."""

    def encoded(self, images: ImageCount) -> float:
        """Count both splits once."""
        return images(self.train_split) + images(self.test_split)


class TrainsByLars(RealLabels, ByEpochs):
    """Settings of the leaderboard's trained probes."""

    encodes_every_epoch: ClassVar[bool] = True

    epochs: int = Field(default=90, gt=0)
    batch_size: int = Field(default=4096, gt=0)
    base_lr: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    warmup_epochs: float = Field(default=10, ge=0)
    weight_decay: float = Field(default=0, ge=0)
    """Of all trained tensors but the classifier's bias."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train the probe a second time without this part of the training images, and choose the epoch
    on them."""


def epoch_ends(images: int, batch: int, epochs: int) -> tuple[int, list[int]]:
    """Return the number of updates, and after how many each epoch is complete.

    Batches run on over the end of an epoch, so the update that completes it has begun the next
    one; the last epoch ends with the last full batch.
    """
    steps = epochs * images // batch
    return steps, [min(steps, -(-epoch * images // batch)) for epoch in range(1, epochs + 1)]


class Knn(RealLabels, ReadsFeatures):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "k-nearest neighbours"
    work: ClassVar[str] = "knn.evaluate"
    test_data: ClassVar[str | None] = (
        "knn_best_k chooses k and knn_best k and T on the test split, with and without "
        "standardisation; knn and knn_standardized choose nothing, those called _held_out "
        "choose on training images"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)

    def headline(self) -> dict[str, str]:
        """Accuracies by the set k and T, and by those that held-out training images choose."""
        by = "k and T chosen on held-out training images"
        forms = {"knn": "k-NN", "knn_standardized": "k-NN, standardised"}
        return forms | {f"{key}_held_out": f"{title}, {by}" for key, title in forms.items()}

    def grid(self, most: int) -> list[tuple[int, float]]:
        """Return all pairs of k and temperature; k of the sweep only up to `most`."""
        counts = sorted({self.k, *(k for k in self.sweep if k <= most)})
        return [(k, t) for k in counts for t in sorted({self.temperature, *self.temperatures})]


class LowShot(FewLabels, RealLabels, ReadsFeatures):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    name: ClassVar[str] = "low_shot"
    title: ClassVar[str] = "logistic regression on few labels"
    work: ClassVar[str] = "low_shot.evaluate"
    minutes: ClassVar[float] = 20.0

    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    fractions: tuple[Fraction, ...] = ()
    """Of the labels, as well: 0.01 and 0.1 in the paper."""
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["lbfgs"] = "lbfgs"
    """In float64. The problem is convex: MSN's and the paper's cyanure has the same optimum."""
    seed: int = 0
    """Seed of the subsets where no lists are given."""

    @model_validator(mode="after")
    def _asked(self) -> Self:
        if not self.shots and not self.fractions:
            raise ValueError("neither shots nor fractions: there is nothing to measure")
        return self

    @property
    def lists(self) -> list[Path]:
        """Return the lists of every split and every fraction."""
        if self.subsets is None:
            return []
        shots = itertools.product(self.shots, range(1, self.splits + 1))
        return [
            *(shots_list(self.subsets, *pair) for pair in shots),
            *(fraction_list(self.subsets, each) for each in self.fractions if each < 1),
        ]

    def headline(self) -> dict[str, str]:
        """Accuracies by the number or the fraction of labels."""
        how = "logistic regression"
        shots = {f"low_shot_{n}": f"{counted(n, 'label')} per class, {how}" for n in self.shots}
        return shots | {
            fraction_name(part): f"{100 * part:g} % of the labels, {how}" for part in self.fractions
        }


class Logistic(RealLabels, ReadsFeatures):
    """Logistic regression on all labels, its penalty chosen on held-out training images."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression on all labels"
    work: ClassVar[str] = "logistic.evaluate"
    minutes: ClassVar[float] = 60.0

    penalties: tuple[Positive, ...] = Field(default=PENALTIES, min_length=1)
    """C: weight of the summed loss beside half the squared weights, as scikit-learn writes it."""
    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose C on."""
    max_iterations: Count = 1000


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
    """C: weight of the summed loss beside half the squared weights, as scikit-learn writes it."""
    max_iterations: Count = 1000
    tolerance: float = Field(default=1e-12, ge=0)
    """Of the largest component of the gradient."""


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
    """After how many updates the test images are scored and the state is saved."""
    batch_size: int = Field(default=16, gt=0)
    size: int = Field(default=512, gt=0)
    """Of crops and windows, and of the shorter side of images."""
    stride: int = Field(default=341, gt=0)
    """Between windows."""
    ratios: tuple[float, float] = (0.5, 2.0)
    """That the shorter side of training images is multiplied by."""
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


class Accuracy(RealLabels, Supervised, Protocol):
    """Mean accuracy over fine-tunings: of every seed, or every number of shots and split."""

    name: ClassVar[str] = "accuracy"
    title: ClassVar[str] = "accuracy of fine-tuned encoders"
    work: ClassVar[str] = "accuracy.evaluate"
    every_rank: ClassVar[bool] = True
    encoder_input: ClassVar[bool] = True

    shots: tuple[Count, ...] = ()
    """This many labels per class instead of a fraction, `splits` times each."""
    splits: int = Field(default=3, gt=0)
    seeds: int = Field(default=1, gt=0)
    """Trainings with seeds `seed`, `seed` + 1 ...; the subset is that of `seed`."""
    seed: int = 0
    epoch: Literal["best", "last"] = "best"
    """Which one is scored: the best on the test split, as in the authors' code, or the last."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train each a second time without this part of the labelled images, and choose the epoch on
    them."""

    test_data: ClassVar[str | None] = (
        "each training is scored at its best epoch on the test split, as the authors do; values "
        "called _last, and all with epoch=last, choose nothing, those called _held_out choose on "
        "training images"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shots and (self.seeds > 1 or self.fraction < 1):
            raise ValueError("shots: the splits are the repetitions; leave out seeds and fraction")
        if self.held_out and self.epoch == "last":
            raise ValueError("held_out chooses an epoch: leave out epoch=last")
        if self.held_out and 1 in self.shots:
            raise ValueError("held_out: of one label per class none can be held out")
        return self

    @property
    def lists(self) -> list[Path]:
        """The lists that its trainings read."""
        return list(dict.fromkeys(f for stage, _ in self.trainings().values() for f in stage.lists))

    def trainings(self) -> dict[str, tuple[FineTune, int]]:
        """Return settings and seed of each run, by the last part of its name; twins come last."""
        plain = self.scored_trainings()
        twins = {
            f"{suffix}{TWIN}": (stage.model_copy(update={"held_out": self.held_out}), seed)
            for suffix, (stage, seed) in plain.items()
        }
        return plain | (twins if self.held_out else {})

    def scored_trainings(self) -> dict[str, tuple[FineTune, int]]:
        """Return the settings of the runs that are scored, which learn from all labelled images."""
        recipe = {name: getattr(self, name) for name in Supervised.model_fields}
        base = FineTune(**recipe, subset_seed=self.seed)
        if not self.shots:
            seeds = range(self.seed, self.seed + self.seeds)
            return {f"seed{seed}": (base.of_own_lists(), seed) for seed in seeds}
        subsets = [(shots, split + 1) for shots in self.shots for split in range(self.splits)]
        return {
            f"{shots}shot-split{split}": (
                base.model_copy(update={"shots": shots, "split": split}).of_own_lists(),
                self.seed,
            )
            for shots, split in subsets
        }

    def headline(self) -> dict[str, str]:
        """Accuracies by the labels, of the best epoch and of the one held-out images choose."""
        found = {}
        for metric in dict.fromkeys(map(self.metric, self.scored_trainings())):
            found[metric] = f"{self.title} ({metric})"
            found[f"{metric}_held_out"] = f"{found[metric]}, epoch chosen on held-out images"
        return found

    def inputs(self) -> dict[str, Input]:
        """Return the fine-tuned runs, and the images that score them."""
        return {"trained": Trained(tuple(self.trainings())), "test": Shards(self.test_split)}

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits of the evaluated dataset that are read, by the trainings, too."""
        return (self.train_split, self.test_split)

    def encoded(self, images: ImageCount) -> float | None:
        """Count the test images for every encoder."""
        return images(self.test_split) * len(self.scored_trainings())

    def metric(self, suffix: str) -> str:
        """Return the metric that a training counts for."""
        shots = self.trainings()[suffix][0].shots
        if shots:
            return f"low_shot_{shots}"
        return "fine_tune" if self.fraction == 1 else fraction_name(self.fraction)


class ColorHistogram(ByEpochs):
    """Probes on every block that predict the image's colour histogram (paper, figure 5 and B)."""

    name: ClassVar[str] = "color_histogram"
    title: ClassVar[str] = "colour histograms"
    work: ClassVar[str] = "color_histogram.evaluate"
    test_data: ClassVar[str | None] = "only scored, after the last epoch"
    labelled: ClassVar[bool] = False

    epochs: int = Field(default=10, gt=0)
    pooling: Literal["cls", "mean"] = "cls"
    """What the probes read of each block: [CLS], as in the paper, or the mean of the patch tokens,
    for encoders whose contrastive head read that."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    momentum: float = 0.9
    warmup_epochs: float = Field(default=1, ge=0)
    probes: int = Field(default=1, gt=0)
    """Of each block, that differ in their initial weights alone: how far they agree is measured."""

    def headline(self) -> dict[str, str]:
        """Errors of the last block and the mean of all."""
        blocks = {"error_last": "last block", "error_mean": "mean of blocks"}
        return {key: f"error of {self.title}, {of}" for key, of in blocks.items()}


class KnnPerBlock(Encodes):
    """k-NN on the raw output of every block, from one forward pass over both splits."""

    name: ClassVar[str] = "knn_per_block"
    title: ClassVar[str] = "k-NN per block"
    work: ClassVar[str] = "knn.evaluate_per_block"
    test_data: ClassVar[str | None] = (
        "best_block is chosen on the test split, held_out_block on training images"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    pooling: Literal["cls", "mean"] | None = None
    """What is read of a block: [CLS], or the mean of the patch tokens; none: what the encoder's
    file says."""
    train_images: int = Field(default=131072, gt=0)
    """At most this many training images, evenly spaced: a tenth of ImageNet."""

    def compared(self, images: int) -> range:
        """Return which of so many training images take part, evenly spaced from the first."""
        return range(0, images, max(1, -(-images // self.train_images)))

    def encoded(self, images: ImageCount) -> float:
        """Count the training images that take part, and every test image, once."""
        return len(self.compared(images(self.train_split))) + images(self.test_split)

    def headline(self) -> dict[str, str]:
        """Accuracies of the last block and of the one that held-out training images choose."""
        blocks = {"last": "last block", "held_out": "block chosen on held-out training images"}
        return {f"knn_standardized_{key}": f"{self.title}, {of}" for key, of in blocks.items()}


class Clustering(ReadsFeatures):
    """k-means on the test split (paper, E): `runs` seeds, best by inertia and mean."""

    name: ClassVar[str] = "clustering"
    title: ClassVar[str] = "k-means"
    work: ClassVar[str] = "clustering.evaluate"
    writes_tensors: ClassVar[bool] = True
    minutes: ClassVar[float] = 30.0
    test_data: ClassVar[str | None] = (
        "standardised with the test split's own mean and standard deviation, as the paper does"
    )
    reads: ClassVar[tuple[str, ...]] = ("test",)
    headlines: ClassVar[dict[str, str]] = {
        "accuracy": "cluster accuracy", "nmi": "NMI of clusters", "ari": "ARI of clusters",
    }  # fmt: skip

    runs: int = Field(default=100, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    n_init: int = Field(default=3, gt=0)
    max_iter: int = Field(default=100, gt=0)
    subsets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further clusterings of some classes only: a name for the metrics and the class names."""


class Geometry(ReadsFeatures):
    """k-NN, few labels and clusters behind corrections that need no training."""

    name: ClassVar[str] = "geometry"
    title: ClassVar[str] = "corrections without training"
    work: ClassVar[str] = "geometry.evaluate"
    minutes: ClassVar[float] = 60.0
    headlines: ClassVar[dict[str, str]] = {
        "knn_raw": "k-NN, as the features are",
        "knn_whitened_0.01": "k-NN, whitened (shrinkage 0.01)",
        "nmi_raw": "NMI of clusters, as the features are",
        "nmi_whitened_0.01": "NMI of clusters, whitened (shrinkage 0.01)",
    }

    shrinkages: tuple[float, ...] = SHRINKAGES
    """Of the covariance towards a multiple of the identity, before it is whitened."""
    removed: tuple[Count, ...] = REMOVED
    """How many of the first principal components are left out."""
    k: int = Field(default=KNN_K, gt=0)
    temperature: Positive = KNN_TEMPERATURE
    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    seed: int = 0
    """Seed of the sets of few labels."""
    runs: int = Field(default=10, gt=0)
    """Of k-means."""


class Retrieval(ReadsFeatures):
    """Nearest images of some images and of cluster centres (paper, figures 7, 10 and 11)."""

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "nearest images"
    work: ClassVar[str] = "retrieval.evaluate"
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "queries and neighbours are images of the test split, clusters those of its clustering"
    )
    headlines: ClassVar[dict[str, str]] = {"query_precision": f"{title} of the query's class, %"}

    clustering: str = "clustering"
    """Which evaluation's clusters."""
    subset: str = ""
    """Clusters of one of its subsets; empty: of the full split."""
    clusters: int = Field(default=15, gt=0)
    """Show at most this many clusters, the first ones."""
    queries: int = Field(default=3, gt=0)
    classes: tuple[str, ...] = ()
    """Classes whose first image is a query; empty: `queries` classes that are spread evenly."""
    neighbors: int = Field(default=10, gt=0)
    side: int = Field(default=96, gt=0)
    """Pixels of a stored thumbnail, at most the encoder's image size."""

    def inputs(self) -> dict[str, Input]:
        """Features and images of the test split, and its clusters."""
        return {
            "test": self.read(self.test_split),
            "images": Shards(self.test_split),
            "clusters": OutputOf(self.clustering),
        }


class Robustness(Encodes):
    """The trained linear probe on shifted data (paper, table 5)."""

    name: ClassVar[str] = "robustness"
    title: ClassVar[str] = "linear probe on shifted data"
    work: ClassVar[str] = "trained_probe.evaluate_robustness"
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the unshifted test split; of a shifted "
        "split only the classes among its labels can be predicted"
    )

    splits: tuple[str, ...] = (
        "imagenet_v2_threshold",
        "imagenet_v2_matched",
        "imagenet_v2_top",
        "imagenet_r",
        "imagenet_sketch",
        "imagenet_a",
    )
    """Splits of the evaluated dataset; each gives a metric of its name."""
    probe: str = "linear_probe"
    """Which evaluation's probe."""

    def inputs(self) -> Mapping[str, Input]:
        """Return the probe, and the images of every split by its name."""
        return {"probe": OutputOf(self.probe)} | {name: Shards(name) for name in self.splits}

    def encoded(self, images: ImageCount) -> float:
        """Count every image once."""
        return sum(map(images, self.splits))

    def headline(self) -> dict[str, str]:
        """Accuracy on each set of images."""
        return {name: f"{self.title}: {name}" for name in self.splits}


class EffectiveInvariance(Encodes):
    """Change of the probe's prediction by rotations and changed colours (paper, table 15)."""

    name: ClassVar[str] = "effective_invariance"
    title: ClassVar[str] = "effective invariance"
    work: ClassVar[str] = "trained_probe.evaluate_invariance"
    labelled: ClassVar[bool] = False
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the test split"
    )

    probe: str = "linear_probe"
    """Which evaluation's probe."""
    draws: int = Field(default=3, gt=0)
    """Random colour changes of each image; rotations are three."""
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """Return the probe and the test images."""
        return {"probe": OutputOf(self.probe), "test": Shards(self.test_split)}

    def encoded(self, images: ImageCount) -> float:
        """Count every test image as it is, turned three times and recoloured."""
        return images(self.test_split) * (4 + self.draws)

    def headline(self) -> dict[str, str]:
        """Invariance to each change."""
        return {f"ei_{change}": f"{self.title} to {change}" for change in ("rotation", "color")}


class Throughput(Protocol):
    """Training speed of each stage and of compared methods on one device (paper, B)."""

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "training speed"
    work: ClassVar[str] = "throughput.evaluate"
    labelled: ClassVar[bool] = False
    encoder_input: ClassVar[bool] = True
    test_data: ClassVar[str | None] = "no images are read"
    headlines: ClassVar[dict[str, str]] = {}  # it measures no encoder

    size: str = "large"
    """Column of the recipes that the stages are measured with."""
    batch_size: int | None = Field(default=None, gt=0)
    """Images in a step; none: the largest power of 2 that fits, on a CPU 16."""
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=10, gt=0)
    images: int = Field(default=1_281_167, gt=0)
    """Training images, for the extrapolation to hours."""

    def inputs(self) -> dict[str, Input]:
        """Nothing beside the encoder's shape."""
        return {}


class Umap(ReadsFeatures):
    """Two-dimensional UMAP embedding of the test split (paper, figures 6 and 8)."""

    name: ClassVar[str] = "umap"
    title: ClassVar[str] = "UMAP embedding"
    work: ClassVar[str] = "explore.evaluate_umap"
    labelled: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 25.0  # to load UMAP's compiled code
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "the embedding is fitted to the test split's features; labels only choose the classes"
    )
    headlines: ClassVar[dict[str, str]] = {}  # it is a picture
    reads: ClassVar[tuple[str, ...]] = ("test",)

    neighbors: int = Field(default=15, gt=1)
    min_dist: float = Field(default=0.1, ge=0)
    metric: Literal["euclidean", "cosine"] = "euclidean"
    classes: tuple[str, ...] = ()
    """Names of the classes to show; empty: all."""
    seed: int = 0


class Explore(ReadsFeatures):
    """A map of images (UMAP), groups of them and the nearest of each (cosine)."""

    name: ClassVar[str] = "explore"
    title: ClassVar[str] = "map, groups and look-alikes"
    work: ClassVar[str] = "explore.evaluate"
    labelled: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 25.0  # to load UMAP's compiled code
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = "everything is fitted to the images that are shown"
    headlines: ClassVar[dict[str, str]] = {}  # it is for looking

    splits: tuple[str, ...] = Field(default=("val",), min_length=1)
    images: int = Field(default=1000, gt=0)
    """At most this many, drawn once from all splits together."""
    side: int = Field(default=64, gt=0)
    """Pixels of a stored picture, at most the encoder's image size."""
    clusters: int | None = Field(default=None, gt=1)
    """For k-means; none: as many as a graph of neighbours falls into."""
    neighbors: int = Field(default=8, gt=0)
    """Look-alikes of each image, among those that are shown."""
    seed: int = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.images * self.side**2 > 5_000_000:
            raise ValueError("images x side x side is above 5,000,000: the page would not open")
        return self

    def inputs(self) -> dict[str, Input]:
        """Features and images of every split."""
        given: dict[str, Input] = {f"features_{name}": self.read(name) for name in self.splits}
        return given | {f"images_{name}": Shards(name) for name in self.splits}


def columns_of(count: int) -> int:
    """Return how many pictures are beside each other in an atlas of this many."""
    return math.ceil(math.sqrt(count))


PROTOCOLS: dict[str, type[Protocol]] = {
    one.name: one
    for one in (
        Knn,
        LowShot,
        Logistic,
        LinearProbe,
        EfficientProbe,
        LarsLinearProbe,
        AttentiveProbe,
        PatchKnn,
        PatchLogistic,
        PatchLinear,
        Accuracy,
        ColorHistogram,
        KnnPerBlock,
        Clustering,
        Geometry,
        Retrieval,
        Robustness,
        EffectiveInvariance,
        Throughput,
        Umap,
        Explore,
        Agreement,
    )
}
"""Protocols by name."""
