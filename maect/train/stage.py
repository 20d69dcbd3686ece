"""Base classes of the stages' settings, which the trainer reads, and learning rates; no torch."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import Field

from maect.core.errors import UserError
from maect.core.settings import Settings, digest
from maect.recipes import Encoder, View
from maect.recipes.cost import FLOAT, GIB, Cost, Footprint, PassMode, encoder_weights, footprint
from maect.recipes.settings import PLAIN, Computing

if TYPE_CHECKING:  # these import torch
    from torch import Tensor, nn

    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.train.checkpoint import StateReader
    from maect.train.objective import Objective

EVERY_OTHER = "every other"
"""Value in `starts_from` that stands for all stages but the one itself."""
LEAST_IMAGES = 16
"""Images of a rank in a pass, at least, if accumulation is chosen: fewer would be slow."""
STATES = 3
"""States on disk at once: two are kept and one is being written."""


# ---- learning rates of parameters


class ParameterGroup(TypedDict):
    """Parameters with one learning rate and weight decay, as AdamW takes them."""

    params: "list[Tensor]"
    names: NotRequired[list[str]]
    lr: NotRequired[float]
    """0 until the first step."""
    peak_lr: float
    weight_decay: float


def layer_scale(name: str, depth: int, decay: float) -> float:
    """Factor on the learning rate of an encoder parameter (Clark et al. 2020, as MAE indexes it).

    The final norm has 1, block j of `depth` has decay^(depth - j), what lies before the blocks
    decay^(depth + 1). Names are those of timm's state dict.
    """
    if name.startswith("norm."):
        return 1.0
    if name.startswith("blocks."):
        return decay ** (depth - int(name.split(".")[1]))
    return decay ** (depth + 1)


def grouped(
    module: "nn.Module", rates: Callable[[str], tuple[float, float]]
) -> list[ParameterGroup]:
    """Group trainable parameters for AdamW by learning rate and weight decay.

    Biases and everything of one dimension (norms) are not decayed; [CLS] and mask token are.
    `rates` gives peak learning rate and weight decay of a parameter by its name.
    """
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        peak, weight_decay = rates(name)
        if parameter.ndim <= 1 or name.endswith(".bias"):
            weight_decay = 0.0
        group = groups.setdefault(
            (peak, weight_decay),
            {"params": [], "names": [], "lr": 0.0, "peak_lr": peak, "weight_decay": weight_decay},
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def schedule(step: int, steps: int, warmup: float, lowest: float = 0.0) -> float:
    """Fraction of the peak learning rate in update `step` (from 0) of `steps`.

    Linear warm-up of `warmup` updates between 0 and the peak, both excluded, then a cosine from
    the peak towards the fraction `lowest`, which it does not reach.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    return lowest + (1 - lowest) * cosine


# ---- stages


class Stage(Settings):
    """One way to make an encoder: its settings are the fields of the class.

    Attributes:
        name: of the stage, and of its rule.
        title: of a run's job, for messages.
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
        """Files that a finished run has, in addition to its record."""
        return ("encoder.safetensors",)

    @property
    def reads_labels(self) -> bool:
        """Return whether a run reads the labels of its training images."""
        return self.labelled

    @property
    def needs_source(self) -> bool:
        """Return whether it starts from a run."""
        return bool(self.starts_from)

    def fingerprint(self, encoder: Encoder, seed: int, data: str, weights: dict[str, str]) -> str:
        """Return the identity of a run's result.

        Args:
            encoder: its shape.
            seed: of everything random.
            data: digest of the shards.
            weights: checksums of the weights to start from, by file.
        """
        return digest(self.name, self, encoder, seed, data, weights)

    def inputs(self, source: "Stage") -> tuple[str, ...]:
        """Return the outputs of a run of stage `source` that it reads."""
        return ("encoder.safetensors",) if self.starts_from else ()

    def check_encoder(self, encoder: Encoder) -> None:
        """Raise ValueError if the settings do not fit an encoder."""

    def check_source(self, encoder: Encoder, source: "Stage", source_encoder: Encoder) -> None:
        """Raise ValueError if it cannot start from a run; " of RUN" is added to the message."""
        source_encoder.check_trainable()
        # The resizing of images for evaluation is no part of the shape.
        if source_encoder.model_copy(update={"resize": encoder.resize}) != encoder:
            raise ValueError("its encoder differs from that")

    def flops_per_image(self, encoder: Encoder) -> float:
        """Return the operations of a training step per image, forward and backward, all views."""
        return 0.0

    def state_bytes(self, encoder: Encoder) -> int:
        """Return the bytes of a finished run: its exports and, if it keeps them, its states."""
        return FLOAT * encoder_weights(encoder)


class Updates(Settings):
    """Settings of the updates of a training."""

    epochs: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Images in the global batch, over all ranks."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the encoder's and decoder's matrix products."""


class Training(Updates, Stage):
    """Settings of every stage that trains.

    Attributes:
        highest_zero: highest ZeRO stage that it can be computed with.
        captured: parts, by their names in `costs`, that the objective's `passes` compute and one
            GPU captures as CUDA graphs; () if it sets no `passes`.
    """

    highest_zero: ClassVar[int] = 3
    captured: ClassVar[tuple[str, ...]] = ("encoder", "decoder")

    @property
    def whole_batch(self) -> bool:
        """Return whether batch statistics or negatives are those of the global batch."""
        return False

    def check_computing(self, computing: Computing) -> None:
        """Raise ValueError for a way of computing that these settings rule out."""
        if computing.zero_stage > self.highest_zero:
            raise ValueError(f"zero_stage {computing.zero_stage}: at most {self.highest_zero}")
        if self.whole_batch and computing.accumulation != 1:
            raise ValueError(
                "accumulation must be 1 in contrastive stages: batch statistics and negatives are "
                "those of the whole global batch"
            )

    def check_ranks(self, ranks: int, computing: Computing = PLAIN) -> None:
        """Raise UserError for a number of ranks that the batch does not split over."""
        if self.batch_size % (ranks * computing.accumulation):
            parts = f"{ranks} ranks x accumulation {computing.accumulation}"
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {parts}")

    def images_of(self, images: int, classes: int) -> int:
        """Return the images of an epoch, given the images and classes of the training split."""
        return images

    def total_steps(self, images: int) -> int:
        """Return the number of updates; batches straddle epochs, and only the rest is dropped."""
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
        """Return the fraction of the peak learning rates in update `step` (from 0) of `steps`."""
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
        """Return the settings of each view of an image."""

    def image_change(self, seed: int) -> "Change | None":
        """Return the change applied to each decoded image before flips and colours, or None."""
        return None

    def training_images(self, index: "Index") -> "Index":
        """Return the images of a split to train on; UserError if they are too few."""
        if index.n < self.batch_size:
            images = "labelled images" if self.labelled else "images"
            raise UserError(
                f"{index.directory}: batch_size {self.batch_size} is larger than its {index.n} "
                f"{images}: an image would be in the same batch twice"
            )
        return index

    def scored_images(self, index: "Index") -> "Index | None":
        """Return the images of the training split to score the epochs on, or None."""
        return None

    @abstractmethod
    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Objective":
        """Return the objective on the CPU.

        Args:
            encoder: its shape.
            seed: of initial weights and of everything drawn in training.
            source: folder of the run to start from, if any.
            classes: names of the classes.

        Raises:
            UserError: the source is missing or does not fit.
        """

    def passes(self, computing: Computing) -> PassMode:
        """Return the precision of the passes, and whether they are recomputed."""
        product = 2 if self.precision == "bf16" else 4
        return PassMode(product, computing.activation_checkpointing)

    @abstractmethod
    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Return the cost of each part of the objective by name, in the forward pass' order."""

    def flops_per_image(self, encoder: Encoder) -> float:
        """Return the operations of a training step per image, forward and backward, all views."""
        return sum(part.operations for part in self.costs(encoder).values())

    def footprint(self, encoder: Encoder, images: int, computing: Computing = PLAIN) -> Footprint:
        """Return the device memory of a pass over `images` images on one rank."""
        costs = self.costs(encoder, computing)
        averaged = 0 if self.encoder_average is None else costs["encoder"].trained
        captured = len(costs.keys() & set(self.captured)) if computing.captures_passes else 0
        return footprint(
            encoder, self.view_settings(), images, list(costs.values()),
            precision=self.precision, averaged=averaged, mixes=self.mixes, captured=captured,
        )  # fmt: skip

    def state_bytes(self, encoder: Encoder) -> int:
        """Return the bytes of a finished run: its exports and, if it keeps them, its states.

        A state has weights and AdamW's two moments in float32, averages and buffers.
        """
        costs = self.costs(encoder)
        state = sum(3 * FLOAT * part.trained + part.buffers for part in costs.values())
        if self.encoder_average is not None:
            state += FLOAT * costs["encoder"].trained
        exported = FLOAT * sum(part.exported for part in costs.values())
        return (STATES * state if self.keeps_state else 0) + exported

    def peak_memory(self, encoder: Encoder, ranks: int, computing: Computing = PLAIN) -> float:
        """Return the bytes of each rank's device at the worst moment of a step."""
        passes = computing.accumulation
        if ranks > 1:  # several ranks capture no passes
            computing = computing.model_copy(update={"cuda_graphs": False})
        footprint = self.footprint(encoder, self.batch_size // (ranks * passes), computing)
        return footprint.peak(computing, ranks)

    def fitted(
        self, encoder: Encoder, computing: Computing, nodes: int, devices: int, memory: float,
        online: bool = False,
    ) -> Computing:  # fmt: skip
        """Return the cheapest way of computing it that fits into the devices' memory.

        More passes per update cost nearly nothing, and neither does leaving the passes of a large
        encoder uncaptured. Checkpointing costs a third of the time, and ZeRO 2 comes last.

        Args:
            encoder: its shape.
            computing: the way that was asked for.
            nodes: of the job.
            devices: of a node.
            memory: bytes of a device.
            online: whether it is evaluated online, by a copy of the weights on the device.

        Raises:
            UserError: nothing fits, with the numbers; or the batch does not split over the ranks.
        """
        ranks = nodes * devices
        self.check_ranks(ranks, computing)
        if online:
            memory -= FLOAT * self.footprint(encoder, 1).weights
        for way in self.ways(computing, ranks):
            if self.peak_memory(encoder, ranks, way) <= memory:
                return way
        least = min(self.peak_memory(encoder, ranks, way) for way in self.ways(computing, ranks))
        raise UserError(
            f"{self.name}: batch_size {self.batch_size} on {ranks} GPUs takes "
            f"{self.peak_memory(encoder, ranks, computing) / GIB:.0f} GiB of each, "
            f"{least / GIB:.0f} with zero_stage, activation_checkpointing and accumulation as far "
            f"as possible, and it has {memory / GIB:.0f}; take more nodes, a smaller batch_size or "
            "a smaller encoder"
        )

    def ways(self, computing: Computing, ranks: int) -> Iterator[Computing]:
        """Yield the ways of computing it that `fitted` may choose, the cheapest first.

        Ways that the stage rules out are skipped, such as several passes if there are negatives.
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

    @abstractmethod
    def rates(self, name: str, depth: int) -> tuple[float, float]:
        """Return a parameter's peak learning rate and weight decay.

        Args:
            name: of the parameter in the objective.
            depth: blocks of the encoder.
        """

    def parameter_groups(self, objective: "Objective") -> list[ParameterGroup]:
        """Return the trainable parameters for AdamW, grouped by their `rates`."""
        depth = len(objective.encoder.blocks)
        return grouped(objective, lambda name: self.rates(name, depth))

    @abstractmethod
    def export(self, run: "RunInputs", reader: "StateReader", index: "Index") -> dict[str, Any]:
        """Write the outputs of a run from its final state.

        Args:
            run: its inputs.
            reader: of the final state.
            index: the training images.

        Returns:
            Entries for its completion record: `pooling` at least.
        """

    def need(self, source: Path | None) -> Path:
        """Return the run to start from; UserError if none is given."""
        if source is None:
            raise UserError(f"stage {self.name} needs a run to start from: none given")
        return source


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a run.

    Attributes:
        folder: of its files, `runs/RUN`.
        shards: shard folder of the train split.
        stage: settings of the training.
        encoder: its shape.
        seed: of everything random.
        source: folder of the run to start from.
        test: shard folder of the split to score a classifier on after every epoch.
        resize: shorter side of evaluated images before the centre crop; None: 256/224 of their
            size.
        computing: how it is computed.
        submitted: identity of the run when its job was submitted; None: trained here and now.
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
    submitted: str | None = None

    @property
    def description(self) -> dict[str, Any]:
        """Entries of `recipe.json` and of the completion record."""
        return {
            "stage": self.stage.name,
            "settings": self.stage.model_dump(mode="json"),
            "computing": self.computing.model_dump(mode="json"),
            "seed": self.seed,
            "encoder": self.encoder.model_dump(mode="json"),
            "source": self.source.name if self.source is not None else None,
        }
