"""The loop over batches: one optimizer update a step, one collective to agree on what is next."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import sum_scalars as summed
from maect.core.errors import UserError
from maect.data.draws import ids_shuffle, lookup_numbers
from maect.data.loader import Batch
from maect.data.transforms import augment
from maect.models.heads import NNCLRHead
from maect.recipes import Encoder
from maect.stages.base import SelfSupervised as Stage
from maect.stages.tune import Tune
from maect.train.ema import update_ema
from maect.train.engine import Engine
from maect.train.guards import collapse, effective_rank, newest, uniformity
from maect.train.metrics import Metrics, log_interval
from maect.train.objectives import Views
from maect.train.parameters import schedule, warmup_steps
from maect.train.stages import saved_buffers
from maect.train.state import Saver, snapshot
from maect.train.usage import usage
from maect.train.watchdog import COMPUTING, READING, SAVING, UPDATING, Watchdog

GUARD_INTERVAL = 10
"""Steps between two looks at the embedding's spread."""


@dataclass
class Loop:
    """Everything that a step touches.

    Attributes:
        step: updates done so far; with the recipe it is the whole position of the run.
        samples: images of the training set, for the epoch that is shown.
        metrics: rank 0's, None elsewhere.
    """

    context: Context
    engine: Engine
    stage: Stage
    encoder: Encoder
    seed: int
    device: torch.device
    step: int
    steps: int
    samples: int
    saver: Saver
    metrics: Metrics | None
    save_seconds: float
    record: dict[str, Any]
    watchdog: Watchdog

    def run(self, batches: Iterator[Batch]) -> bool:
        """Train until the last step, or until a rank was told to stop.

        Returns:
            Whether all steps are done. Either way the state of the last step is saved.

        Raises:
            UserError: the loss is no longer a finite number.
        """
        self._views = self.stage.view_settings()
        self._saved_at = self._began = self._stepped_at = self._logged_at = time.monotonic()
        self._logged = self.step
        self._spent = self.metrics.device_seconds if self.metrics else 0.0
        head = getattr(self.engine.module, "head", None)
        self._changing = [] if head is None else list(head.buffers())
        self._before = [buffer.clone() for buffer in self._changing]
        self.watchdog.at(READING, self.step + 1)
        for batch in batches:
            self.watchdog.at(COMPUTING, self.step + 1)
            go_on, save_now = self._update(batch)
            if save_now and self.step < self.steps and go_on:
                self.save()
            if not go_on:
                break
            self.watchdog.at(READING, self.step + 1)
        self.save(wait=True)
        return self.step >= self.steps

    def _update(self, batch: Batch) -> tuple[bool, bool]:
        """One step; returns whether to go on, and whether a state is due."""
        parts: dict[str, Tensor] = {}
        for before, buffer in zip(self._before, self._changing, strict=True):
            before.copy_(buffer)
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        pieces = self.stage.accumulation
        for number in range(pieces):
            loss, scalars = self.engine(self._prepare(batch, number, pieces))
            self.engine.backward(loss)
            losses += loss.detach() / pieces
            for name, value in scalars.items():
                parts[name] = parts.get(name, 0) + value / pieces
            if number < pieces - 1:
                self.engine.step(0.0)
        due = self.context.rank == 0 and time.monotonic() - self._saved_at > self.save_seconds
        flags = [self.context.stop_requested(), due, self.saver.error is not None]
        total = summed([losses, *parts.values(), *map(float, flags)], self.device)
        values = [value / self.context.world_size for value in total[: 1 + len(parts)]]
        if not math.isfinite(values[0]):
            self._not_finite("loss", values[0])
        self.watchdog.at(UPDATING, self.step + 1)
        norm, _ = self.engine.step(self.rate())
        if not math.isfinite(norm):
            self._not_finite("gradient norm", norm)
        self._averages()
        self.step += 1
        named = dict(zip(["loss", *parts], values, strict=True))
        if self.step % GUARD_INTERVAL == 0:
            named |= self._check_spread()
        self._log(named, norm)
        stop, save, failed = (value > 0 for value in total[1 + len(parts) :])
        if failed:
            self.saver.error = None
        return not stop, save

    def rate(self) -> float:
        """Fraction of the peak learning rates in the coming update."""
        return schedule(self.step, self.steps, warmup_steps(self.stage, self.steps))

    def _prepare(self, batch: Batch, number: int, pieces: int) -> Any:
        """Views, masks and dice of one of `pieces` parts of a batch, on the device."""
        share = len(batch.ids) // pieces
        rows = slice(number * share, (number + 1) * share)
        ids, epochs = batch.ids[rows], batch.epochs[rows]
        raw = batch.images[:, rows].to(self.device, non_blocking=True)
        images = torch.stack(
            [augment(raw[i], view, i, self.seed, epochs, ids) for i, view in enumerate(self._views)]
        )
        order = dice = None
        if self.stage.mask_ratio:
            order = ids_shuffle(self.encoder.patches, self.seed, epochs, ids, len(self._views))
            order = order.to(self.device, non_blocking=True)
        head = getattr(self.stage, "head", None)
        if head is not None:
            dice = lookup_numbers(head.topk, self.seed, epochs, ids, len(self._views)).to(
                self.device
            )
        who = torch.from_numpy(ids).to(self.device)
        labels = torch.from_numpy(batch.labels[rows]).to(self.device)
        return Views(images, order, who, labels, dice)

    def _averages(self) -> None:
        """Follow the weights with the encoder's and the projector's EMA."""
        head = getattr(self.engine.module, "head", None)
        if isinstance(head, NNCLRHead) and head.slow_projector is not None:
            with self.engine.full_parameters(head.projector):
                head.update_ema()
        if isinstance(self.stage, Tune):
            update_ema(self.engine.fragments, self.stage.encoder_ema)

    def _log(self, values: dict[str, float], norm: float) -> None:
        now, size = time.monotonic(), self.stage.batch_size
        done = self.step * size
        # From step to step: a loader that is too slow shows.
        speed = size / max(now - self._stepped_at, 1e-9)
        self._stepped_at = now
        self.context.report(
            {
                "epoch": min(done // self.samples + 1, self.stage.epochs),
                "epochs": self.stage.epochs,
                "step": self.step,
                "steps": self.steps,
                "loss": values["loss"],
                "images_per_second": speed,
            }
        )
        every = log_interval(self.steps)
        if self.metrics is None or (self.step % every and self.step != self.steps):
            return
        low, high = self.engine.learning_rates()
        more = {"epoch": done / self.samples, "lr": high, "lr_lowest": low, "grad_norm": norm}
        mean_speed = (self.step - self._logged) * size / max(now - self._logged_at, 1e-9)
        self._logged, self._logged_at = self.step, now
        timing = {"images_per_second": mean_speed, "device_seconds": self.device_seconds()}
        timing |= usage(self.stage, self.encoder, mean_speed, self.context.world_size, self.device)
        self.metrics.log(self.step, values | more, timing)

    def device_seconds(self) -> float:
        """Device time over all attempts so far; on rank 0."""
        now = time.monotonic() - self._began
        return self._spent + now * self.context.world_size

    def save(self, wait: bool = False) -> None:
        """Save this step's state, in the background unless told to wait.

        Raises:
            UserError: it was to be waited for, and failed.
        """
        self.watchdog.at(SAVING, self.step + 1)
        if self.metrics is not None:
            self.metrics.sync()
        buffers = saved_buffers(self.engine.module) if self.context.rank == 0 else {}
        tensors = snapshot(self.engine.fragments, buffers)
        self.saver.save(self.step, tensors, self.record)
        self._saved_at = time.monotonic()
        if wait:
            self.saver.wait()
            (failed,) = summed([float(self.saver.error is not None)], self.device)
            if failed:
                raise UserError(self.saver.error or f"state of step {self.step} not saved")

    def _check_spread(self) -> dict[str, float]:
        """Stop when the embedding has collapsed; the queue is the same on every rank."""
        head = getattr(self.engine.module, "head", None)
        if not isinstance(head, NNCLRHead):
            return {}
        vectors = newest(head, self.stage.batch_size)
        spread = {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}
        fault = collapse(spread)
        if fault:
            self.save(wait=True)
            raise UserError(f"step {self.step}: {fault}; the state is saved")
        return spread

    def _not_finite(self, what: str, value: float) -> None:
        """Stop before the weights are spoilt; the forward pass has already changed the queue."""
        for before, buffer in zip(self._before, self._changing, strict=True):
            buffer.copy_(before)
        self.save(wait=True)
        raise UserError(
            f"{what} {value} in step {self.step + 1}: the state before it is saved; "
            "a lower learning rate or fp32 precision may help"
        )
