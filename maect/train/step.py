"""One update: its sums over the ranks, the buffers that its forward passes change, its time."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import sum_on_device
from maect.train.objective import Objective


class StepResults(NamedTuple):
    """Results of an update, the same on every rank.

    Attributes:
        grad_norm: Euclidean norm of the whole gradient.
        stop: whether a rank was asked to stop.
        save: whether a state is due.
        means: of the objective's scalars over the ranks, `loss` first; `lookup_accuracy` is the
            mean over all lookups whose labels are known, 0 without any.
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
        means: dict[str, Tensor],
        world_size: int,
        device: torch.device,
    ) -> None:
        """Sum this rank's values; called on every rank, and nothing waits for the device.

        Args:
            squared_norm: this rank's part of the gradient's squared norm, [].
            stop: 1 if this rank was asked to stop, else 0, [].
            save: 1 if this rank wants a state, else 0, [].
            means: the objective's scalars on this rank, [] each; `loss` is among them. A
                `lookup_accuracy` is a mean over `lookup_known` lookups, if there is that number.
            world_size: number of ranks.
            device: where the values are.
        """
        lookups = [name for name in means if name.startswith("lookup_accuracy")]
        counts = {name: name.replace("accuracy", "known") for name in lookups}
        self._counts = {name: count for name, count in counts.items() if count in means}
        """Names of the numbers by which the means of each rank are weighted."""
        weighted = {name: means[name].double() * means[n] for name, n in self._counts.items()}
        values = (means | weighted).values()
        self._total = sum_on_device([squared_norm, stop, save, *values], device)
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
        counts = {name: sums.pop(count) for name, count in self._counts.items()}
        weights = dict.fromkeys(sums, self._world_size) | counts
        means = {name: value / max(weights[name], 1) for name, value in sums.items()}
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


class DeviceTime:
    """Times the steps of an attempt, and adds up seconds x ranks of the whole run.

    Attributes:
        useful: seconds x ranks of all steps whose result was kept. Saving is not useful, nor is an
            attempt's set-up: its first step counts as its second.
    """

    def __init__(
        self, context: Context, useful: float, logged: Mapping[str, Any] = {}, shown: int = 8
    ) -> None:
        """Go on from a state.

        Args:
            context: this rank's.
            useful: seconds x ranks of the steps before, by the state's record.
            logged: timing of the run's last log entry, whether its step was kept or not.
            shown: number of last steps whose mean is the speed.
        """
        self._context = context
        self.useful = useful
        self._before = float(logged.get("device_seconds", 0.0))
        self._held_before = float(logged.get("held_seconds", 0.0))
        self._steps = 0
        self._recent = deque[float](maxlen=shown)
        self._evaluating = 0.0
        self.start()

    def start(self) -> None:
        """Begin the first step of an attempt."""
        self._began = time.monotonic()
        self._stepped = self._began

    @contextmanager
    def outside_steps(self, useful: bool, online: bool = False) -> Iterator[None]:
        """Leave the block's time out of the step.

        Args:
            useful: whether it counts as useful, as an evaluation does and a save does not.
            online: whether it is an online evaluation, whose share is logged.
        """
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self._stepped += spent
        if useful:
            self.useful += spent * self._context.world_size
        if online:
            self._evaluating += spent

    def step(self) -> float:
        """Return the seconds of the step that ends now, its wait for the batch included."""
        now = time.monotonic()
        seconds = now - self._stepped
        self._stepped = now
        self._steps += 1
        # The first step warms up: the second one counts twice.
        if self._steps == 2:
            self.useful += 2 * seconds * self._context.world_size
        elif self._steps > 2:
            self.useful += seconds * self._context.world_size
        self._recent.append(max(seconds, 1e-9))
        return self._recent[-1]

    @property
    def steps_per_second(self) -> float:
        """Mean speed of the last steps, with their waits for the loader."""
        return len(self._recent) / sum(self._recent)

    @property
    def device_seconds(self) -> float:
        """Seconds x ranks for which the run's jobs held their devices, as far as they logged."""
        seconds = time.monotonic() - self._context.began
        return self._held_before + seconds * self._context.world_size

    @property
    def online_part(self) -> float:
        """Share of the attempt's time that online evaluations took, 0 to 1."""
        return self._evaluating / max(time.monotonic() - self._began, 1e-9)

    @property
    def timing(self) -> dict[str, float]:
        """Entries of the log, in seconds x ranks."""
        seconds = time.monotonic() - self._began
        return {
            "device_seconds": self._before + seconds * self._context.world_size,
            "held_seconds": self.device_seconds,
            "useful_seconds": self.useful,
        }
