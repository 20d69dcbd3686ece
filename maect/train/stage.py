"""What a stage declares, which is what the trainer asks of it; no torch at import."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.errors import UserError
from maect.core.settings import Settings
from maect.recipes import Encoder, View
from maect.recipes.flops import parameters

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective

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
