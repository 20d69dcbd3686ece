"""Protocols that run an encoder without training a probe, or fine-tune it, or time it."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from maect.evaluate.base import (
    Count,
    Encodes,
    Features,
    ImageCount,
    Input,
    KnnVote,
    OutputOf,
    Protocol,
    RealLabels,
    Shards,
    Trained,
)
from maect.recipes import KNN_K, CropScale
from maect.recipes.few_labels import fraction_name
from maect.stages.base import Supervised
from maect.stages.fine_tune import FineTune

TWIN = "_held_out"
"""Suffix of the name of a run that is trained without the held-out images."""


class KnnPerBlock(KnnVote, Encodes):
    """k-NN on the raw output of every block, from one forward pass over both splits."""

    name: ClassVar[str] = "knn_per_block"
    title: ClassVar[str] = "k-NN per block"
    work: ClassVar[str] = "encoder_knn.evaluate_per_block"
    test_data: ClassVar[str | None] = (
        "best_block is chosen on the test split, held_out_block on training images"
    )

    pooling: Literal["cls", "mean"] | None = None
    """Pooling of a block: [CLS], or the mean of the patch tokens; None: the encoder's own."""
    train_images: int = Field(default=131072, gt=0)
    """At most this many training images, evenly spaced: a tenth of ImageNet."""

    def compared(self, images: int) -> range:
        """Return which of `images` training images take part, evenly spaced from the first."""
        return range(0, images, max(1, -(-images // self.train_images)))

    def encoded(self, images: ImageCount) -> float:
        """Count the training images that take part, and every test image, once."""
        return len(self.compared(images(self.train_split))) + images(self.test_split)

    def headline(self) -> dict[str, str]:
        """Accuracies of the last block and of the one that held-out training images choose."""
        blocks = {"last": "last block", "held_out": "block chosen on held-out training images"}
        return {f"knn_standardized_{key}": f"{self.title}, {of}" for key, of in blocks.items()}


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
    """Epoch that is scored: the best on the test split, as in the authors' code, or the last."""
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
        """Splits of the evaluated dataset that are read, including by its trainings."""
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
    """Evaluation whose probe is used."""

    @field_validator("splits")
    @classmethod
    def _are_columns(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        if "imagenet_v2" in splits:  # a column, of its variant `threshold`
            raise ValueError(
                "imagenet_v2 has variants; name it imagenet_v2_threshold, _matched or _top"
            )
        return splits

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
    """Evaluation whose probe is used."""
    draws: int = Field(default=3, gt=0)
    """Random colour changes of each image; rotations are three."""
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """Return the probe and the test images."""
        return {"probe": OutputOf(self.probe), "test": Shards(self.test_split)}

    def encoded(self, images: ImageCount) -> float:
        """Count every test image unchanged, turned three times and recoloured."""
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
    by_size: ClassVar[bool] = True
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
        """Return no inputs besides the encoder, whose shape is read."""
        return {}


class Agreement(Protocol):
    """Part of the nearest training images that two views of a test image share."""

    name: ClassVar[str] = "agreement"
    title: ClassVar[str] = "neighbours that two views share"
    work: ClassVar[str] = "encoder_knn.evaluate_agreement"
    labelled: ClassVar[bool] = False
    encoder_input: ClassVar[bool] = True
    headlines: ClassVar[dict[str, str]] = {"agreement": "neighbours that two views share"}

    k: int = Field(default=KNN_K, gt=0)
    """Neighbours of each view."""
    images: int = Field(default=2000, gt=1)
    """Test images, at most, evenly spaced."""
    bank: int = Field(default=20000, gt=0)
    """Training images, at most, evenly spaced, to find neighbours among."""
    crop_scale: CropScale = (0.25, 1.0)
    """Part of the image that a view shows."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    seed: int = 0
    """Seed of the views, which are the same for every encoder."""

    def inputs(self) -> dict[str, Input]:
        """Features of the training images, and the test images."""
        return {"train": Features(self.train_split), "test": Shards(self.test_split)}

    def encoded(self, images: ImageCount) -> float:
        """Count two views of each test image."""
        return 2 * min(self.images, images(self.test_split))
