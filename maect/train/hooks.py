"""Hooks of a training (watchdog, scores, online evaluation); the trainer calls each in turn."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maect.core.context import Context
from maect.recipes import Encoder
from maect.train.engine import Engine
from maect.train.objective import Objective
from maect.train.stage import Training
from maect.train.step import DeviceTime

HEALTH_INTERVAL = 10
"""Steps between two checks of the embeddings, which wait for the device."""


@dataclass
class Update:
    """An update that was made, as the host reads it later. Hooks add their values to it.

    Attributes:
        step: its number, from 1.
        values: to log, by name: means over the global batch, `loss` among them.
        grad_norm: Euclidean norm of the whole gradient.
        timing: seconds and speeds to log, which differ from start to start.
        pictures: to show, uint8 [H, W, 3].
        log_now: whether it is logged whatever the interval of the log is.
        fault: why the training must end here, if it must.
    """

    step: int
    values: dict[str, float]
    grad_norm: float
    timing: dict[str, float] = field(default_factory=dict)
    pictures: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    log_now: bool = False
    fault: str | None = None


class Hook:
    """Base class of hooks. All ranks have the same ones, since some exchange values."""

    def begin(self, activity: str, step: int) -> None:
        """Note that this rank begins an activity of a step (`maect.train.watchdog`)."""

    def reads_model(self, step: int) -> bool:
        """Return whether `after_step` reads weights or buffers, which are to be of this step."""
        return False

    def after_step(self, update: Update) -> None:
        """Follow an update."""

    def before_save(self, record: dict[str, Any]) -> None:
        """Add the hook's own state to the record that it resumes from."""

    def close(self) -> None:
        """Finish, also after an error."""


@dataclass(kw_only=True)
class Session:
    """A training under way, as the trainer and its hooks see it.

    Attributes:
        context: this rank's.
        stage: settings of the training.
        encoder: shape of the encoder.
        objective: module from a batch to a loss, which `engine` runs.
        engine: passes, updates and this rank's slices.
        device: of this rank.
        images: of an epoch.
        steps: of the whole training.
        clock: times the steps; part of the state.
        hooks: in the order in which they are called: later ones see what earlier ones add.
    """

    context: Context
    stage: Training
    encoder: Encoder
    objective: Objective
    engine: Engine
    device: torch.device
    images: int
    steps: int
    clock: DeviceTime
    hooks: list[Hook] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        """Speed of the last steps, over all ranks."""
        return self.clock.steps_per_second * self.stage.batch_size

    def images_after(self, step: int) -> int:
        """Return the number of images trained on after `step` steps, over all epochs."""
        return step * self.stage.batch_size

    def begin(self, activity: str, step: int) -> None:
        """Tell all hooks that this rank begins an activity of a step."""
        for hook in self.hooks:
            hook.begin(activity, step)


class SumLosses(Hook):
    """Sums the losses of each epoch; they are part of the state and of the run's record."""

    def __init__(self, session: Session, resumed: list[tuple[float, int]]) -> None:
        """Go on from the sums and numbers of a state, [] at the start."""
        self._session = session
        self._losses = list(resumed)
        """Sum and number of the losses of each epoch."""

    def after_step(self, update: Update) -> None:
        """Add the loss to the epoch in which the step began."""
        session, loss = self._session, update.values["loss"]
        epoch = session.images_after(update.step - 1) // session.images
        while len(self._losses) <= epoch:
            self._losses.append((0.0, 0))
        total, count = self._losses[epoch]
        self._losses[epoch] = (total + loss, count + 1)
        if update.step == session.steps and len(self._losses) < session.stage.epochs:
            self._losses.append((loss, 1))  # the last epoch has no step of its own

    def before_save(self, record: dict[str, Any]) -> None:
        """Add the sums and numbers."""
        record["losses"] = list(self._losses)


class CheckHealth(Hook):
    """Checks the embeddings of an objective with heads, every `HEALTH_INTERVAL` steps and last."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def reads_model(self, step: int) -> bool:
        """Return whether the embeddings are checked after a step."""
        return step % HEALTH_INTERVAL == 0 or step == self._session.steps

    def after_step(self, update: Update) -> None:
        """Log the spread of the last batch's embeddings; a collapse is a fault."""
        if not self.reads_model(update.step):
            return
        values, fault = self._session.objective.health(self._session.stage.batch_size)
        if fault is not None:
            update.fault = fault
            update.log_now = True
        if fault is not None or update.step % HEALTH_INTERVAL == 0:
            update.values |= values


class ReportProgress(Hook):
    """Tells the launcher how far the training is."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._knn: float | None = None

    def after_step(self, update: Update) -> None:
        """Report the step, with the accuracy of the last online evaluation in percent."""
        session, epochs = self._session, self._session.stage.epochs
        self._knn = update.values.get("online_knn", self._knn)
        epoch = session.images_after(update.step) // session.images + 1
        session.context.report(
            {
                "epoch": min(epoch, epochs),
                "epochs": epochs,
                "step": update.step,
                "steps": session.steps,
                "loss": update.values["loss"],
                "images_per_second": session.images_per_second,
                "knn": self._knn,
            }
        )
