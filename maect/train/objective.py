"""Interface between the trainer and the module that a stage builds."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maect.data.loader import Batch
from maect.models.vit import VisionEncoder
from maect.train.checkpoint import StateReader
from maect.train.passes import Passes

Gathered = Callable[[nn.Module], AbstractContextManager[None]]
"""A context in which a part's parameters are complete on every rank."""


class Objective(nn.Module):
    """From a batch to a loss. DeepSpeed wraps it.

    Attributes:
        passes: what `forward` computes with fixed shapes, without other ranks.
    """

    encoder: VisionEncoder
    passes: Passes

    @property
    def has_health(self) -> bool:
        """Return whether `health` has anything to say; to ask it is to wait for the device."""
        return False

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return what is drawn for samples before they reach the device, by name; in a thread."""
        return {}

    def prepare(self, batch: Batch, device: torch.device) -> Any:
        """The argument of `forward`: images, masks and random draws, on the device.

        Only what `tensors_in` accepts: on a GPU they are made beside the step before.
        """
        raise NotImplementedError

    def inputs_of_passes(self, inputs: Any) -> list[tuple[Tensor, ...]]:
        """The arguments of each call of `passes` in a forward pass."""
        raise NotImplementedError

    def forward(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a mean over this rank's samples, and detached scalars to log."""
        raise NotImplementedError

    def predict(self, images: Tensor) -> Tensor:
        """Class of each image, uint8 [b, C, S, S]: int64 [b]; of a classifier only."""
        raise NotImplementedError

    def parts_read(self) -> dict[str, nn.Module]:
        """Parts, by name, that an online evaluation reads: at least the encoder."""
        return {"encoder": self.encoder}

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """Return what an evaluation would read of normalized images [b, C, S, S], [b, D].

        It uses the copies `parts` of `parts_read`; images are on the device.
        """
        raise NotImplementedError

    def reconstruct(
        self, parts: nn.ModuleDict, images: Tensor, ids_shuffle: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return what is visible of normalized images [b, C, S, S], and what is made of it.

        It uses the copies `parts` of `parts_read`. `ids_shuffle` has patch numbers, int64 [b, L],
        the visible ones first. None: nothing is reconstructed.
        """
        return None

    def changing_buffers(self) -> list[Tensor]:
        """Buffers that a forward pass changes: put back when its loss is not finite."""
        return []

    def forget_samples(self, what: Collection[str]) -> None:
        """Drop `ids` or `labels` of the samples in buffers: those of a run on other images."""

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


def tensors_in(inputs: Any) -> list[Tensor]:
    """Return the tensors of an objective's inputs, however deep in dataclasses and containers.

    Raises:
        TypeError: something else is among them, which might have tensors that nobody sees.
    """
    if isinstance(inputs, Tensor):
        return [inputs]
    if is_dataclass(inputs):
        inputs = vars(inputs)
    if isinstance(inputs, Mapping):
        inputs = [*inputs.values()]
    if isinstance(inputs, tuple | list):
        return [tensor for part in inputs for tensor in tensors_in(part)]
    if inputs is None or isinstance(inputs, bool | int | float | str):
        return []
    raise TypeError(
        f"{type(inputs).__name__} among what `prepare` returned; make it a tensor or a dataclass, "
        "tuple, list or dict of tensors, which a GPU may keep until they have been read"
    )
