"""What the trainer asks of a stage and of the module that the stage builds."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from maect.data.index import Index
from maect.data.loader import Batch
from maect.data.transforms import Change
from maect.models.vit import VisionEncoder
from maect.recipes import Encoder, View
from maect.train.checkpoint import StateReader

Gathered = Callable[[nn.Module], AbstractContextManager[None]]
"""A context in which a part's parameters are complete on every rank."""


class Objective(nn.Module):
    """From a batch to a loss. DeepSpeed wraps it."""

    encoder: VisionEncoder

    def prepare(self, batch: Batch, device: torch.device) -> Any:
        """The argument of `forward`: images, masks and random draws, on the device."""
        raise NotImplementedError

    def forward(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a mean over this rank's samples, and detached scalars to log."""
        raise NotImplementedError

    def predict(self, images: Tensor) -> Tensor:
        """Class of each image, uint8 [b, 3, S, S]: int64 [b]; of a classifier only."""
        raise NotImplementedError

    def parts_read(self) -> dict[str, nn.Module]:
        """Parts, by name, out of which an evaluation would make features: "encoder" at least."""
        return {"encoder": self.encoder}

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """What an evaluation would read of normalized images [b, 3, S, S], [b, D].

        Args:
            parts: copies of `parts_read`.
            images: on the device.
        """
        raise NotImplementedError

    def changing_buffers(self) -> list[Tensor]:
        """Buffers that a forward pass changes: put back when its loss is not finite."""
        return []

    def after_update(self, gathered: Gathered) -> None:
        """Follow the weights after each update."""

    def health(self, batch_size: int) -> tuple[dict[str, float], str | None]:
        """Values to log now and then, and what is wrong with them, if anything."""
        return {}, None

    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers that are part of the state: queue, statistics, EMA projector, positions."""
        kept = self.state_dict().keys()
        return {name: value for name, value in self.named_buffers() if name in kept}

    @torch.no_grad()
    def restore(self, reader: StateReader) -> None:
        """Take trained parameters and buffers out of a state; on the CPU."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.full("param", name, parameter.shape))
        for name, value in self.saved_buffers().items():
            value.copy_(reader.buffer(name))


class EngineSettings(Protocol):
    """How a step is computed."""

    @property
    def batch_size(self) -> int:
        """Images of the global batch."""

    @property
    def accumulation(self) -> int:
        """Forward passes per update."""

    @property
    def zero_stage(self) -> int:
        """What DeepSpeed's ZeRO shards, 0 to 3."""

    @property
    def beta1(self) -> float:
        """Decay of AdamW's first moment."""

    @property
    def beta2(self) -> float:
        """Decay of AdamW's second moment."""

    @property
    def compile(self) -> bool:
        """Whether to compile the transformer blocks."""

    @property
    def attention(self) -> Literal["sdpa", "flash_attn"]:
        """Which kernel computes attention."""


class Trainable(EngineSettings, Protocol):
    """Settings of a stage that trains, with what the trainer asks of them."""

    name: ClassVar[str]
    keeps_state: ClassVar[bool]

    @property
    def epochs(self) -> int:
        """Passes over the images."""

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """Of matrix products."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Files that a finished run has beside `run.json`."""

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average; None: no average."""

    def model_dump(self, *, mode: str = ...) -> dict[str, Any]:
        """The settings as JSON values."""

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that the batch does not split over."""

    def training_images(self, index: Index) -> Index:
        """The images to train on, out of a split."""

    def total_steps(self, images: int) -> int:
        """Updates of the whole training."""

    def lr_multiplier(self, step: int, steps: int) -> float:
        """Fraction of the peak learning rates in an update."""

    def view_settings(self) -> tuple[View, ...]:
        """How each view of an image is made."""

    def image_change(self, seed: int) -> Change | None:
        """What happens to each decoded image, if anything."""

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of a training step, per image."""

    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> Objective:
        """The objective on the CPU, with initial weights from `seed` and `source`."""

    def parameter_groups(self, objective: Objective) -> list[dict[str, Any]]:
        """Trainable parameters with their peak learning rates."""

    def export(
        self, folder: Path, encoder: Encoder, reader: StateReader, source: Path | None, index: Index
    ) -> dict[str, Any]:
        """Write what the run leaves; returns what `run.json` says about it."""
