"""Settings of supervised fine-tuning."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, Fraction, Images, Input, Protocol, Shards
from maect.evaluate.job import Job
from maect.recipes import Encoder
from maect.recipes.flops import encode_flops


class FineTune(Protocol):
    """Supervised fine-tuning of the encoder (paper, B and E); defaults: MAE's recipe for ViT-L.

    Trains once for every seed, or for every number of shots and split.
    """

    name: ClassVar[str] = "fine_tune"
    title: ClassVar[str] = "fine-tuning"
    every_rank: ClassVar[bool] = True
    encoder_input: ClassVar[bool] = True

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
    def lists(self) -> str | None:
        """Folder of official low-shot lists that is read, if any."""
        return self.subsets

    def inputs(self) -> dict[str, Input]:
        """Images of both splits."""
        return {"train": Shards(self.train_split), "test": Shards(self.test_split)}

    def flops(self, encoder: Encoder, images: Images) -> float:
        """Train on every image that counts, three passes each, and encode the test images."""
        one, test = encode_flops(encoder), images(self.test_split)
        if self.shots:  # so many labels of each of ImageNet's classes, several times
            return one * (3 * self.splits * sum(self.shots) * 1000 * self.epochs + test)
        labels = self.fraction * images(self.train_split)
        return one * self.seeds * (3 * labels * self.epochs + test)

    def evaluate(self, context: Context, job: Job) -> dict[str, Any]:
        """Train and score (`maect.evaluate.fine_tune`)."""
        from maect.evaluate.fine_tune import evaluate

        return evaluate(context, job, self)

    @property
    def full_precision(self) -> bool:
        """Whether the encoder runs in float32."""
        return self.precision == "fp32"

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
