"""Hooks: what happens beside the steps of a training; the trainer calls each in a list."""

from dataclasses import dataclass, field
from typing import Any

from maect.core.context import Context
from maect.train.device_time import DeviceTime


@dataclass
class Update:
    """An update that was made, as the host reads it later. Hooks add their values to it.

    Attributes:
        step: its number, from 1.
        values: to log, by name: means over the global batch, `loss` among them.
        grad_norm: Euclidean norm of the whole gradient.
        timing: seconds and speeds to log, which differ from start to start.
        log_now: whether it is logged whatever the interval of the log is.
        fault: why the training must end here, if it must.
    """

    step: int
    values: dict[str, float]
    grad_norm: float
    timing: dict[str, float] = field(default_factory=dict)
    log_now: bool = False
    fault: str | None = None


class Hook:
    """Base class: something beside the steps. All ranks have the same hooks, as some exchange."""

    def begin(self, activity: str, step: int) -> None:
        """Note that this rank begins an activity of a step (`maect.train.watchdog`)."""

    def reads_model(self, step: int) -> bool:
        """Return whether `after_step` reads weights or buffers, which are to be of this step."""
        return False

    def after_step(self, update: Update) -> None:
        """Follow an update."""

    def before_save(self, record: dict[str, Any]) -> None:
        """Add to the record of a state what the hook resumes from."""

    def close(self) -> None:
        """Finish, also after an error."""


class EpochLosses(Hook):
    """Sums the losses of each epoch; they are part of the state and of the run's record."""

    def __init__(self, images: int, batch_size: int, resumed: list[tuple[float, int]]) -> None:
        """Count epochs of `images` images in batches of `batch_size`, after those of a state."""
        self._images = images
        self._batch_size = batch_size
        self._losses = list(resumed)
        """Sum and number of the losses of each epoch."""

    def after_step(self, update: Update) -> None:
        """Add the loss to the epoch in which the step began."""
        epoch = (update.step - 1) * self._batch_size // self._images
        while len(self._losses) <= epoch:
            self._losses.append((0.0, 0))
        total, count = self._losses[epoch]
        self._losses[epoch] = (total + update.values["loss"], count + 1)

    def before_save(self, record: dict[str, Any]) -> None:
        """Add the sums and numbers."""
        record["losses"] = list(self._losses)


class Progress(Hook):
    """Tells the launcher how far the training is."""

    def __init__(
        self, context: Context, clock: DeviceTime, images: int, batch_size: int, epochs: int,
        steps: int,
    ) -> None:  # fmt: skip
        """Report steps of a training with `images` images an epoch."""
        self._context = context
        self._clock = clock
        self._images = images
        self._batch_size = batch_size
        self._epochs = epochs
        self._steps = steps
        self._knn: float | None = None

    def after_step(self, update: Update) -> None:
        """Report the step, with the accuracy of the last online evaluation in percent."""
        self._knn = update.values.get("online_knn", self._knn)
        epoch = update.step * self._batch_size // self._images + 1
        self._context.report(
            {
                "epoch": min(epoch, self._epochs),
                "epochs": self._epochs,
                "step": update.step,
                "steps": self._steps,
                "loss": update.values["loss"],
                "images_per_second": self._clock.steps_per_second * self._batch_size,
                "knn": self._knn,
            }
        )
