"""What each evaluation can be told, as types, with the paper's values as defaults."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.core.settings import Settings

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Protocol(Settings):
    """Base of the settings of an evaluation."""

    train_split: str = "train"
    test_split: str = "val"

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits of the evaluated dataset that this evaluation may read."""
        return (self.train_split, self.test_split)

    @property
    def needs(self) -> tuple[str, ...]:
        """Evaluations of the same run whose files this one reads."""
        return ()


class Knn(Protocol):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    k: int = Field(default=10, gt=0)
    temperature: float = Field(default=0.07, gt=0)
    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)


class LinearProbe(Protocol):
    """Linear probing (paper, table 9): ten learning rates, trained together."""

    epochs: int = Field(default=50, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    learning_rates: tuple[Positive, ...] = Field(
        default=(0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01), min_length=1
    )
    momentum: float = 0.9
    warmup_epochs: float = Field(default=5, ge=0)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    concat: bool = False
    """Probe concatenations instead: of the last 1, 2, 4 and 6 blocks, and of [CLS] and mean."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of the frozen encoder; the classifiers are float32."""
    seed: int = 0


class LowShot(Protocol):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    fractions: tuple[Fraction, ...] = ()
    """Of the labels, as well: 0.01 and 0.1 in the paper."""
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["lbfgs", "cyanure"] = "lbfgs"
    """Of the same convex problem, in float64; MSN and the paper used cyanure."""
    seed: int = 0
    """Seed of the subsets where no lists are given."""
    subsets: str | None = None
    """Folder of the official lists (`maect retrieve`); none: seeded subsets."""

    @model_validator(mode="after")
    def _asked(self) -> "LowShot":
        if not self.shots and not self.fractions:
            raise ValueError("neither shots nor fractions: there is nothing to measure")
        return self


class FineTune(Protocol):
    """Supervised fine-tuning of the encoder (paper, B and E); defaults: MAE's recipe for ViT-L.

    Trains once for every seed, or for every number of shots and split.
    """

    fraction: Fraction = 1.0
    """Of the labels of every class."""
    shots: tuple[Count, ...] = ()
    """So many labels per class instead, `splits` times each."""
    splits: int = Field(default=3, gt=0)
    subsets: str | None = None
    """Folder of the official lists (`maect retrieve`); none: seeded subsets."""
    seeds: int = Field(default=1, gt=0)
    """Trainings with seeds `seed`, `seed` + 1 ...; the subset is that of `seed`."""
    seed: int = 0

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
    def _consistent(self) -> "FineTune":
        if self.shots and (self.seeds > 1 or self.fraction < 1):
            raise ValueError("shots: the splits are the repetitions; leave out seeds and fraction")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} of {self.epochs} epochs")
        if self.min_lr > self.base_lr * self.batch_size / 256:
            raise ValueError(f"min_lr {self.min_lr} is above the peak learning rate")
        return self


class Clustering(Protocol):
    """k-means on the test split (paper, E): `runs` seeds, best by inertia and mean."""

    runs: int = Field(default=100, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    n_init: int = Field(default=3, gt=0)
    max_iter: int = Field(default=100, gt=0)
    subsets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further clusterings of some classes only: a name for the metrics and the class names."""


class Robustness(Protocol):
    """The trained linear probe on shifted data (paper, table 5)."""

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
    """Which evaluation's classifier."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of the encoder; the classifier is float32."""

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits of the evaluated dataset that this evaluation may read."""
        return self.splits

    @property
    def needs(self) -> tuple[str, ...]:
        """The probe."""
        return (self.probe,)


class EffectiveInvariance(Protocol):
    """How much rotations and colour changes move the probe's prediction (paper, table 15)."""

    probe: str = "linear_probe"
    """Which evaluation's classifier."""
    draws: int = Field(default=3, gt=0)
    """Random colour changes of each image; rotations are three."""
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0

    @property
    def needs(self) -> tuple[str, ...]:
        """The probe."""
        return (self.probe,)


class ColorHistogram(Protocol):
    """Probes on every block that predict the image's colour histogram (paper, figure 5 and B)."""

    epochs: int = Field(default=10, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    learning_rate: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    momentum: float = 0.9
    warmup_epochs: float = Field(default=1, ge=0)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0


class Retrieval(Protocol):
    """Nearest images of some images and of cluster centres (paper, figures 7, 10 and 11)."""

    clustering: str = "clustering"
    """Which evaluation's clusters."""
    subset: str = ""
    """Clusters of one of its subsets; empty: of the whole split."""
    clusters: int = Field(default=15, gt=0)
    """Show at most so many clusters, the first ones."""
    queries: int = Field(default=3, gt=0)
    neighbors: int = Field(default=10, gt=0)
    side: int = Field(default=96, gt=0)
    """Pixels of a stored thumbnail, at most the encoder's image size."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The clusters."""
        return (self.clustering,)


class Throughput(Protocol):
    """Training speed of each stage and of compared methods on one device (paper, B)."""

    size: str = "large"
    """Column of the recipes that the stages are measured with."""
    batch_size: int | None = Field(default=None, gt=0)
    """Images in a step; none: the largest power of 2 that fits, on a CPU 16."""
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=10, gt=0)
    images: int = Field(default=1_281_167, gt=0)
    """Training images, for the extrapolation to hours."""


class Umap(Protocol):
    """Two-dimensional UMAP embedding of the test split (paper, figures 6 and 8)."""

    neighbors: int = Field(default=15, gt=1)
    min_dist: float = Field(default=0.1, ge=0)
    metric: Literal["euclidean", "cosine"] = "euclidean"
    classes: tuple[str, ...] = ()
    """Names of the classes to show; empty: all."""
    seed: int = 0


PROTOCOLS: dict[str, type[Protocol]] = {
    "knn": Knn,
    "linear_probe": LinearProbe,
    "low_shot": LowShot,
    "fine_tune": FineTune,
    "clustering": Clustering,
    "robustness": Robustness,
    "effective_invariance": EffectiveInvariance,
    "color_histogram": ColorHistogram,
    "retrieval": Retrieval,
    "throughput": Throughput,
    "umap": Umap,
}
