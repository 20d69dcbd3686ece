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
    """Sums over the ranks of one update, in one exchange; the host reads them when it has time.

    Attributes:
        squared_norm: of the whole gradient, float64 [] on the device.
        loss: summed over the ranks, float64 [] on the device.
    """

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
        total = sum_on_device([squared_norm, stop, save, *means.values()], device)
        self._names = ("squared_norm", "stop", "save", *means)
        self._world_size = world_size
        named = dict(zip(self._names, total.unbind(), strict=True))
        self.squared_norm = named["squared_norm"]
        self.loss = named["loss"]
        self._total = total
        self._copied: torch.cuda.Event | None = None

    @property
    def is_not_finite(self) -> Tensor:
        """Return 1 if the loss or the gradient is not finite, else 0: float32 [] on the device."""
        return (~torch.isfinite(self.loss + self.squared_norm)).float()

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
    """Buffers that forward passes change, such as a queue, with copies to take a pass back.

    The forward pass of a step runs before the host knows whether the update before it was made. So
    there are copies from before each of the last two forward passes.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._changing = objective.changing_buffers()
        self._before = [buffer.clone() for buffer in self._changing]
        self._before_last = [buffer.clone() for buffer in self._changing]
        self._is_ahead = False
        """Whether a forward pass has run since the last update."""

    def copy(self) -> None:
        """Copy the buffers, before the forward passes of an update."""
        self._before, self._before_last = self._before_last, self._before
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

    def restore(self) -> None:
        """Take back the forward passes of an update that was skipped, and of the step after it."""
        copies = self._before_last if self._is_ahead else self._before
        for buffer, copy in zip(self._changing, copies, strict=True):
            buffer.copy_(copy)
        self._is_ahead = False
