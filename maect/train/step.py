"""One update: its sums over the ranks, and the buffers that its forward passes change."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from maect.core.distributed import sum_on_device
from maect.train.objective import Objective


class StepResults(NamedTuple):
    """Results of an update, the same on every rank.

    Attributes:
        grad_norm: Euclidean norm of the whole gradient.
        stop: whether a rank was asked to stop.
        save: whether a state is due.
        means: of the objective's scalars over the ranks, `loss` first.
    """

    grad_norm: float
    stop: bool
    save: bool
    means: dict[str, float]


class StepSums:
    """Sums over the ranks of one update, in one exchange; the host reads them when it has time."""

    def __init__(
        self,
        squared_norm: Tensor,
        stop: Tensor,
        save: Tensor,
        means: Mapping[str, Tensor],
        world_size: int,
        device: torch.device,
    ) -> None:
        """Sum this rank's values; called on every rank, and nothing waits for the device.

        Args:
            squared_norm: this rank's part of the gradient's squared norm, [].
            stop: 1 if this rank was asked to stop, else 0, [].
            save: 1 if this rank wants a state, else 0, [].
            means: the objective's scalars on this rank, [] each; `loss` is among them.
            world_size: number of ranks.
            device: where the values are.
        """
        self._total = sum_on_device([squared_norm, stop, save, *means.values()], device)
        self._names = ("squared_norm", "stop", "save", *means)
        self._world_size = world_size
        self._copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Let the device copy the sums to the host after all work queued so far."""
        if self._total.is_cuda:
            host = torch.empty_like(self._total, device="cpu", pin_memory=True)
            self._total = host.copy_(self._total, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> StepResults:
        """Return the results; waits until the device has copied them."""
        if self._copied is not None:
            self._copied.synchronize()
        sums = dict(zip(self._names, self._total.tolist(), strict=True))
        norm = math.sqrt(sums.pop("squared_norm"))
        stop = sums.pop("stop") > 0
        save = sums.pop("save") > 0
        means = {name: value / self._world_size for name, value in sums.items()}
        return StepResults(norm, stop, save, means)


class Buffers:
    """Buffers that forward passes change, such as a queue, with a copy from before the last pass.

    The forward pass of a step runs before the host saves the state of the update before it.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._changing = objective.changing_buffers()
        self._before = [buffer.clone() for buffer in self._changing]
        self._is_ahead = False
        """Whether a forward pass has run since the last update."""

    def copy(self) -> None:
        """Copy the buffers, before the forward passes of an update."""
        if self._changing:
            torch._foreach_copy_(self._before, self._changing)
        self._is_ahead = True

    def commit(self) -> None:
        """Accept the changes of the last forward pass: its update has been made."""
        self._is_ahead = False

    def saved(self) -> dict[str, Tensor]:
        """Return the buffers of a state by name, as they were after the last update."""
        buffers = self._objective.saved_buffers()
        if not self._is_ahead:
            return buffers
        copies = {id(b): copy for b, copy in zip(self._changing, self._before, strict=True)}
        return {name: copies.get(id(buffer), buffer) for name, buffer in buffers.items()}
