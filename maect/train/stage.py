"""Declaration of a stage, which the trainer reads; no torch at import."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.errors import UserError
from maect.core.settings import Settings, digest
from maect.recipes import Encoder, View
from maect.recipes.computing import PLAIN, Computing
from maect.recipes.cost import FLOAT, Cost, PassMode, encoder_weights
from maect.recipes.memory import GIB, Footprint, footprint

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective
    from maect.train.optimizer import ParameterGroup

EVERY_OTHER = "every other"
"""Stands in `starts_from` for all stages but the one itself."""
LEAST_IMAGES = 16  # of a rank in a pass where accumulation is chosen for it: less would be slow
CAPTURED = {"encoder", "decoder"}  # parts of an objective whose passes a GPU replays
STATES = 3  # two are kept and one is being written


class Stage(Settings):
    """One way to make an encoder: its settings are the fields of the class.

    Attributes:
        name: of the stage, and of its rule.
        title: what a run of it is doing, for messages.
        starts_from: stages whose runs it may start from, or `EVERY_OTHER`; () starts from nothing.
        trains: whether it trains; else it only converts.
        trains_encoder: whether it trains the encoder; else only what is on it.
        keeps_state: whether a finished run keeps its last states.
        labelled: whether it learns from labels.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    starts_from: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[bool] = True
    trains_encoder: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True
    labelled: ClassVar[bool] = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that a finished run has beside its record."""
        return ("encoder.safetensors",)

    @property
    def reads_labels(self) -> bool:
        """Return whether a run reads the labels of what it is trained on."""
        return self.labelled

    @property
    def needs_source(self) -> bool:
        """Return whether it starts from a run."""
        return bool(self.starts_from)

    def fingerprint(self, encoder: Encoder, seed: int, data: str, weights: dict[str, str]) -> str:
        """Identity of a run's result: also by its shards' digest and its first weights'."""
        return digest(self.name, self, encoder, seed, data, weights)

    def inputs(self, source: "Stage") -> tuple[str, ...]:
        """Return which outputs of a run of `source` it reads."""
        return ("encoder.safetensors",) if self.starts_from else ()

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder that these settings do not fit (ValueError)."""

    def check_source(self, encoder: Encoder, source: "Stage", source_encoder: Encoder) -> None:
        """Refuse a run to start from: a ValueError whose message goes on with " of RUN"."""
        source_encoder.check_trainable()
        # How images are resized for evaluation is not the encoder's.
        if source_encoder.model_copy(update={"resize": encoder.resize}) != encoder:
            raise ValueError("its encoder differs from that")

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        return 0.0

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes of a finished run: what it exports, and its states if it keeps them."""
        return FLOAT * encoder_weights(encoder)


class Updates(Settings):
    """Settings of the updates of a training."""

    epochs: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Images in the global batch, over all ranks; each gives one view or more."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    precision: Literal["bf16", "fp32"] = "bf16"


class Training(Updates, Stage):
    """Settings of every stage that trains, up to ZeRO stage `highest_zero`."""

    highest_zero: ClassVar[int] = 3

    @property
    def whole_batch(self) -> bool:
        """Return whether batch statistics or negatives are those of the whole global batch."""
        return False

    def check_computing(self, computing: Computing) -> None:
        """Refuse a way of computing that these settings rule out (ValueError)."""
        if computing.zero_stage > self.highest_zero:
            raise ValueError(f"zero_stage {computing.zero_stage}: at most {self.highest_zero}")
        if self.whole_batch and computing.accumulation != 1:
            raise ValueError(
                "accumulation must be 1 in contrastive stages: batch statistics and negatives are "
                "those of the whole global batch"
            )

    def check_ranks(self, ranks: int, computing: Computing = PLAIN) -> None:
        """Refuse a number of processes that the batch does not split over (UserError)."""
        if self.batch_size % (ranks * computing.accumulation):
            parts = f"{ranks} ranks x accumulation {computing.accumulation}"
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {parts}")

    def images_of(self, images: int, classes: int) -> int:
        """Images of an epoch, of a training split with this many images and classes."""
        return images

    def total_steps(self, images: int) -> int:
        """Updates; batches straddle epochs, so nothing is dropped but the last rest."""
        return self.epochs * images // self.batch_size

    @property
    @abstractmethod
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""

    @property
    def lowest(self) -> float:
        """Fraction of the peak learning rates that they fall to."""
        return 0.0

    def lr_multiplier(self, step: int, steps: int) -> float:
        """Fraction of the peak learning rates in update `step` (from 0) of `steps`."""
        from maect.train.optimizer import schedule

        return schedule(step, steps, round(self.warmup * steps), self.lowest)

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average; None: no average."""
        return None

    @property
    def mixes(self) -> bool:
        """Return whether images are mixed in pairs."""
        return False

    @abstractmethod
    def view_settings(self) -> tuple[View, ...]:
        """Return how each view of an image is made."""

    def image_change(self, seed: int) -> "Change | None":
        """Return the change applied to each decoded image before flips and colours, or None."""
        return None

    def training_images(self, index: "Index") -> "Index":
        """The images to train on, out of a split; UserError if they are too few."""
        if index.n < self.batch_size:
            images = "labelled images" if self.labelled else "images"
            raise UserError(
                f"{index.directory}: batch_size {self.batch_size} is larger than its {index.n} "
                f"{images}: an image would be in the same batch twice"
            )
        return index

    def scored_images(self, index: "Index") -> "Index | None":
        """The images of a split that the epochs are scored on, in place of a test split's."""
        return None

    @abstractmethod
    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Objective":
        """The objective on the CPU, with weights from `seed` and from the run at `source`.

        The seed is that of everything drawn in training, too. UserError: no source, or a wrong one.
        """

    def passes(self, computing: Computing) -> PassMode:
        """Return how the training passes through its parts."""
        product = 2 if self.precision == "bf16" else 4
        return PassMode(product, computing.activation_checkpointing)

    @abstractmethod
    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Count what each part of the objective takes, by its name, in the forward pass' order."""

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        return sum(part.operations for part in self.costs(encoder).values())

    def footprint(self, encoder: Encoder, images: int, computing: Computing = PLAIN) -> Footprint:
        """Device memory of a pass over this many images on one rank."""
        costs = self.costs(encoder, computing)
        averaged = 0 if self.encoder_average is None else costs["encoder"].trained
        captured = len(costs.keys() & CAPTURED) if computing.captures_passes else 0
        return footprint(
            encoder, self.view_settings(), images, list(costs.values()),
            precision=self.precision, averaged=averaged, mixes=self.mixes, captured=captured,
        )  # fmt: skip

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes of a finished run: its exports and, if it keeps them, its states.

        A state has weights and AdamW's two moments in float32, averages and buffers.
        """
        costs = self.costs(encoder)
        state = sum(3 * FLOAT * part.trained + part.buffers for part in costs.values())
        if self.encoder_average is not None:
            state += FLOAT * costs["encoder"].trained
        exported = FLOAT * sum(part.exported for part in costs.values())
        return (STATES * state if self.keeps_state else 0) + exported

    def peak_memory(self, encoder: Encoder, ranks: int, computing: Computing = PLAIN) -> float:
        """Bytes of each rank's device at the worst moment of a step."""
        passes = computing.accumulation
        if ranks > 1:  # which capture no passes
            computing = computing.model_copy(update={"cuda_graphs": False})
        footprint = self.footprint(encoder, self.batch_size // (ranks * passes), computing)
        return footprint.peak(computing, ranks)

    def fitted(
        self, encoder: Encoder, computing: Computing, nodes: int, devices: int, memory: float,
        online: bool = False,
    ) -> Computing:  # fmt: skip
        """Return the cheapest way of computing it that fits into each device's memory (bytes).

        More passes per update cost nearly nothing, and so does not to capture those of a large
        encoder; checkpointing costs a third of the time, and ZeRO 2 comes last. With `online`
        evaluation the device has a copy of the weights.

        Raises:
            UserError: it is not enough in any way, with the numbers, and what would be; or the
                batch does not split over the ranks.
        """
        ranks = nodes * devices
        self.check_ranks(ranks, computing)
        memory -= FLOAT * self.footprint(encoder, 1).weights if online else 0
        if chosen := self._fitting(encoder, computing, ranks, memory):
            return chosen
        more = range(nodes + 1, 8 * nodes + 1)
        even = (n for n in more if not self.batch_size % (n * devices))
        fits = (n for n in even if self._fitting(encoder, computing, n * devices, memory))
        enough = next(fits, None)
        least = min(self.peak_memory(encoder, ranks, way) for way in self.ways(computing, ranks))
        raise UserError(
            f"{self.name}: batch_size {self.batch_size} on {ranks} GPUs takes "
            f"{self.peak_memory(encoder, ranks, computing) / GIB:.0f} GiB of each, "
            f"{least / GIB:.0f} with zero_stage, activation_checkpointing and accumulation as far "
            f"as possible, and it has {memory / GIB:.0f}; "
            + (f"{enough} nodes would do" if enough else "a smaller batch_size or encoder would do")
            + ("; zero_stage 3 is counted as 2" if computing.zero_stage == 3 else "")
        )

    def ways(self, computing: Computing, ranks: int) -> Iterator[Computing]:
        """The ways of computing it that `fitted` may choose, the cheapest first.

        A stage refuses what it is not made for, such as several passes where there are negatives.
        """
        given = computing.accumulation
        most = max(given, self.batch_size // ranks // LEAST_IMAGES)
        zero, checkpointing = computing.zero_stage, computing.activation_checkpointing
        ways = [(zero, checkpointing), (zero, True), (max(2, zero), True)]
        for zero, checkpointing in dict.fromkeys(ways):
            for passes in range(given, most + 1, given):
                how = {"zero_stage": zero, "activation_checkpointing": checkpointing}
                way = computing.model_copy(update=how | {"accumulation": passes})
                with suppress(ValueError, UserError):
                    self.check_computing(way)
                    self.check_ranks(ranks, way)
                    yield way
                    if way.captures_passes and ranks == 1:
                        yield way.model_copy(update={"cuda_graphs": False})

    def _fitting(
        self, encoder: Encoder, computing: Computing, ranks: int, memory: float
    ) -> Computing | None:
        ways = self.ways(computing, ranks)
        return next((w for w in ways if self.peak_memory(encoder, ranks, w) <= memory), None)

    @abstractmethod
    def rates(self, name: str, depth: int) -> tuple[float, float]:
        """Peak learning rate and weight decay of a parameter, with an encoder of `depth` blocks."""

    def parameter_groups(self, objective: "Objective") -> "list[ParameterGroup]":
        """Trainable parameters for AdamW, by their `rates`."""
        from maect.train.optimizer import grouped

        depth = len(objective.encoder.blocks)
        return grouped(objective, lambda name: self.rates(name, depth))

    @abstractmethod
    def export(self, run: "RunInputs", reader: "StateReader", index: "Index") -> dict[str, Any]:
        """Write the files that a run leaves, from its final state.

        Returns:
            What its record says beside what it says of every run: `pooling` at least.
        """

    def need(self, source: Path | None) -> Path:
        """The run to start from; UserError if none is given."""
        if source is None:
            raise UserError(f"stage {self.name} needs a run to start from: none given")
        return source


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a run.

    Attributes:
        folder: where it leaves its files, `runs/RUN`.
        shards: shard folder of the train split.
        seed: of everything random.
        source: folder of the run to start from.
        test: shard folder of the split that a classifier is scored on after every epoch.
        resize: of images that are evaluated: shorter side before the centre crop; none: 256/224 of
            their size.
    """

    folder: Path
    shards: Path
    stage: Training
    encoder: Encoder
    seed: int
    source: Path | None = None
    test: Path | None = None
    resize: int | None = None
    computing: Computing = PLAIN

    @property
    def description(self) -> dict[str, Any]:
        """What `recipe.json` and the completion record say about the run."""
        return {
            "stage": self.stage.name,
            "settings": self.stage.model_dump(mode="json"),
            "computing": self.computing.model_dump(mode="json"),
            "seed": self.seed,
            "encoder": self.encoder.model_dump(mode="json"),
            "source": self.source.name if self.source is not None else None,
        }
