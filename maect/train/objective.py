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
    """A module from a batch to a loss, which DeepSpeed wraps.

    Attributes:
        encoder: a part of every objective.
        passes: the part of `forward` that has fixed shapes and waits for no other rank; None: no
            part is captured (`Training.captured`).
    """

    encoder: VisionEncoder
    passes: Passes | None = None

    @property
    def has_health(self) -> bool:
        """Return whether there are embeddings that `health` can check."""
        return False

    def draw(self, epochs: NDArray[np.int64], ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Draw random values for samples on the CPU, by name; a loader's thread calls it.

        Args:
            epochs: of the samples, [b].
            ids: stable sample ids, [b].
        """
        return {}

    def prepare(self, batch: Batch, device: torch.device) -> Any:
        """Return the argument of `forward`: images, masks and random draws, on the device.

        It holds only types that `tensors_in` accepts, since a GPU makes it during the step before.
        """
        raise NotImplementedError

    def inputs_of_passes(self, inputs: Any) -> list[tuple[Tensor, ...]]:
        """Return the arguments of each call of `passes` in a forward pass."""
        raise NotImplementedError

    def forward(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, a mean over this rank's samples, and detached scalars to log."""
        raise NotImplementedError

    def predict(self, images: Tensor) -> Tensor:
        """Return the class of each image, uint8 [b, C, S, S]: int64 [b]; for classifiers only."""
        raise NotImplementedError

    def parts_read(self) -> dict[str, nn.Module]:
        """Return the parts that an online evaluation reads, by name: at least the encoder."""
        return {"encoder": self.encoder}

    def features(self, parts: nn.ModuleDict, images: Tensor) -> Tensor:
        """Return the features that evaluations read, [b, D].

        Args:
            parts: copies of `parts_read`.
            images: normalized, [b, C, S, S], on the device.
        """
        raise NotImplementedError

    def reconstruct(
        self, parts: nn.ModuleDict, images: Tensor, ids_shuffle: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return masked images and their reconstructions, normalized, or None.

        Args:
            parts: copies of `parts_read`.
            images: normalized, [b, C, S, S], on the device.
            ids_shuffle: patch numbers, int64 [b, L], the visible ones first.
        """
        return None

    def changing_buffers(self) -> list[Tensor]:
        """Return the buffers that a forward pass changes; see `maect.train.step.Buffers`."""
        return []

    def forget_samples(self, fields: Collection[str]) -> None:
        """Forget `ids` or `labels` of samples in buffers, since they were of other images."""

    def after_update(self, gathered: Gathered) -> None:
        """Update values that depend on the weights, such as an EMA projector."""

    def health(self, batch_size: int) -> tuple[dict[str, float], str | None]:
        """Return values to log, and the fault that they show, or None; waits for the device."""
        return {}, None

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of a state: queue, statistics, EMA projector, positions."""
        saved = self.state_dict().keys()
        return {name: value for name, value in self.named_buffers() if name in saved}

    @torch.no_grad()
    def restore(self, reader: StateReader) -> None:
        """Load trained parameters and buffers from a state; on the CPU."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.full("param", name, parameter.shape))
        for name, value in self.saved_buffers().items():
            value.copy_(reader.buffer(name))


def tensors_in(inputs: Any) -> list[Tensor]:
    """Return all tensors of an objective's inputs, within dataclasses and containers.

    Raises:
        TypeError: there is an object of another type, which might hold tensors.
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
