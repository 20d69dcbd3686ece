"""Training of small heads on a frozen encoder's features: batches, exchange, exact resume.

The encoder runs once per image. Every rank encodes its share of the batch; what the ranks exchange
is up to the heads. State is saved after every epoch, every two minutes like that of a training, and
when the job is asked to stop.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from maect.core import distributed
from maect.core.arrays import read_arrays, write_arrays
from maect.core.errors import UserError
from maect.data.index import Index
from maect.evaluate.base import Interrupted
from maect.evaluate.trained import Group, Trainee, TrainsProbe, Trial

log = logging.getLogger(__name__)

STATE = "heads.safetensors"
FORMAT = 2  # of this file
SAVE_SECONDS = 120.0
"""Between two states; more where writing one takes over a twentieth of it."""


class Probing:
    """One rank's part of training a probe on what the encoder gives."""

    def __init__(self, trial: Trial, settings: TrainsProbe, probe: Trainee, identity: str) -> None:
        """Resume from a saved state, if there is one of this very training.

        Raises:
            UserError: all epochs together are less than a batch.
        """
        self.context, self.settings, self.trial = trial.context, settings, trial
        self.probe, self.identity = probe, identity
        self.file, self.run = trial.job.state / STATE, trial.job.run
        self.plan = settings.plan(probe.learnt)
        self.steps, self.ends = self.plan.steps, self.plan.ends
        self.step, self.done = 0, 0
        self._saved_at, self._save_took = monotonic(), 0.0
        self._load()

    def epochs(self) -> Iterator[int]:
        """Train, and yield the number of each epoch after its last update, before it is saved.

        Raises:
            Interrupted: asked to stop; the state is saved.
            UserError: heads that are no longer finite, on every rank; the state is not saved.
        """
        yield from self._finished()
        started, first = monotonic(), self.step
        left = self.steps - self.step
        for images, targets in self.settings.batches(self.trial, self.probe, self.step, left):
            rate = self.settings.rate(self.step, self.plan)
            loss = self.probe.step(self.probe.read(images), targets, rate)
            self.step += 1
            stop = self.context.stop_requested()
            save = distributed.any_rank(stop or self._is_due())
            reported = self.step % 10 == 0 or self.step == self.steps
            # Not in every step: to look at a loss is to wait for the GPU.
            if save or reported or self._at_end():
                self._finite(loss)
            yield from self._finished()
            if reported:
                seconds = monotonic() - started
                self._report(loss, (self.step - first) * self.settings.batch_size / seconds)
            if save and self.step < self.steps:
                self._save()
                if distributed.any_rank(stop):
                    raise Interrupted

    def _is_due(self) -> bool:
        """Return whether rank 0 wants a state."""
        pause = max(SAVE_SECONDS, 20 * self._save_took)
        return self.context.rank == 0 and monotonic() - self._saved_at > pause

    def _at_end(self) -> bool:
        return self.done < len(self.ends) and self.ends[self.done] <= self.step

    def _finite(self, loss: Tensor) -> None:
        """Refuse broken heads of any rank before they are scored or saved."""
        if distributed.any_rank(not bool(loss.isfinite().all())):
            raise UserError(
                f"{self.run}: after {self.step} updates on {self.trial.train.directory} the probe "
                "is not finite; the encoder diverged or its weights are damaged, or the rate is "
                "too high"
            )

    def _finished(self) -> Iterator[int]:
        while self._at_end():
            yield self.done
            self.done += 1
            self._save()

    def _report(self, loss: Tensor, speed: float) -> None:
        images = self.probe.learnt.n
        self.context.report(
            {
                "epoch": self.step * self.settings.batch_size // images,
                "epochs": -(-self.steps * self.settings.batch_size // images),
                "step": self.step,
                "steps": self.steps,
                "loss": float(loss.min()) if len(loss) else None,
                "images_per_second": speed,
            }
        )

    def _save(self) -> None:
        """All heads in one file: a restart may have another number of ranks."""
        started = monotonic()
        tensors = {f"kept.{name}": value for name, value in self.probe.kept.items()}
        for name, group in self.probe.groups.items():
            tensors |= {f"{name}.{key}": full(group, key) for key in group.SPLIT}
            tensors |= {f"{name}.{key}": getattr(group, key) for key in group.SHARED}
        if self.context.rank:
            return
        record = {"format": FORMAT, "identity": self.identity, "step": self.step, "done": self.done}
        plain = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
        write_arrays(self.file, plain, {"record": json.dumps(record | {"own": self.probe.record})})
        self.context.saved(self.step)
        self._saved_at = monotonic()
        self._save_took = self._saved_at - started

    def _load(self) -> None:
        record, fault = distributed.from_rank_0(_record(self.file, self.identity))
        if record is None:
            if fault and self.context.rank == 0:
                log.warning("%s: %s; the training starts over", self.file, fault)
            return
        tensors = load_file(self.file)
        for name, group in self.probe.groups.items():
            for key in group.SPLIT:
                getattr(group, key).data.copy_(tensors[f"{name}.{key}"][group.rows])
            for key in group.SHARED:
                getattr(group, key).data.copy_(tensors[f"{name}.{key}"])
        own = {name for name in tensors if name.startswith("kept.")}
        self.probe.kept = {name.removeprefix("kept."): tensors[name] for name in own}
        self.step, self.done, self.probe.record = record["step"], record["done"], record["own"]


def full(group: Group, key: str, rows: slice = slice(None)) -> Tensor:
    """Rows of a group's split tensor, those of all ranks together; called on every rank."""
    mine: Tensor = getattr(group, key).detach()
    if distributed.rank_and_size()[1] == 1:
        return mine[rows]
    out = mine.new_zeros(group.total, *mine.shape[1:])
    out[group.rows] = mine
    return distributed.sum_over_ranks(out[rows].contiguous())


def check(train: Index, test: Index, *, labelled: bool = True) -> None:
    """Refuse, by a UserError, splits without labels, of other classes, or of a single class."""
    for index in (train, test):
        if index.n == 0:
            raise UserError(f"{index.directory}: holds no images")
        if labelled and index.labels.min(initial=0) < 0:
            raise UserError(f"{index.directory}: the probe needs labels; some images have none")
    if labelled and train.class_names != test.class_names:
        raise UserError(f"{train.directory} and {test.directory}: their classes differ")
    if labelled and len(train.class_names) < 2:
        raise UserError(f"{train.directory}: the probe needs at least two classes")


def _record(file: Path, identity: str) -> tuple[dict[str, Any] | None, str]:
    """Return what a state file says about itself, or why a training cannot resume from it."""
    if not file.exists():
        return None, ""
    try:
        record: dict[str, Any] = json.loads(read_arrays(file)[1]["record"])
        if record["format"] != FORMAT:
            return None, "saved by another version of maect"
        if record["identity"] != identity:
            return None, "of another encoder, other images or other settings"
    except (UserError, KeyError, TypeError, ValueError):
        return None, "not a saved training, or damaged"
    return record, ""
