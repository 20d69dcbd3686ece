"""The log of a run, with one entry for each logged step even after interruptions."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image

from maect.core.files import FOLDER_MODE, atomic_write, write_text
from maect.recipes.cost import peak_flops
from maect.records import entries, line_of, log_interval
from maect.train.hooks import Hook, Session, Update

log = logging.getLogger(__name__)

PICTURES = "online"
"""Folder of a run for the pictures of its online evaluations."""


class Metrics:
    """Writes the log on rank 0: all but "timing" is a function of recipe, seed and data."""

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        """Resume after `step` of `steps`: drop later entries, and what is no entry."""
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "metrics.jsonl"
        logged = entries(self.path)
        self.last_timing: dict[str, float] = logged[-1]["timing"] if logged else {}
        _repair(self.path, logged, step, steps)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append the entry of a step."""
        self._file.write(line_of(step, values, timing))
        self._file.flush()
        for name, value in (values | timing).items():
            self._board.add_scalar(name, value, step)

    def show(self, step: int, pictures: dict[str, NDArray[np.uint8]]) -> None:
        """Add a step's pictures [H, W, 3] to TensorBoard and to the run's folder."""
        for name, picture in pictures.items():
            self._board.add_image(f"online/{name}", picture, step, dataformats="HWC")
            path = self.path.parent / PICTURES / f"{name}-{step:08d}.jpg"
            try:
                path.parent.mkdir(FOLDER_MODE, exist_ok=True)  # not the run's, if that was moved
                with atomic_write(path) as temporary:
                    Image.fromarray(picture).save(temporary, "JPEG", quality=90)
            except OSError as error:  # such as too many files: that must not end the training
                log.warning("%s not written: %s", path, error)

    def sync(self) -> None:
        """Force all entries to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish both files."""
        self.sync()
        self._file.close()
        self._board.close()


def _repair(path: Path, logged: list[dict[str, Any]], step: int, steps: int) -> None:
    """Keep the entries up to a step, one of each step, and warn if some are missing."""
    kept: list[dict[str, Any]] = []
    last = 0
    for entry in logged:
        if last < entry["step"] <= step:
            last = entry["step"]
            kept.append(entry)
    interval = log_interval(steps)
    lost = step // interval - sum(entry["step"] % interval == 0 for entry in kept)
    if lost:
        log.warning("%s: %d entries are lost; the training is not", path, lost)
    # A new file, so that a superseded job that still has the old one open writes to nowhere.
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))


class LogSteps(Hook):
    """Logs the steps whose turn it is; the last hook, since the others add values."""

    def __init__(self, session: Session, metrics: Metrics) -> None:
        """Log a training; on rank 0."""
        self._session = session
        self._metrics = metrics
        self._interval = log_interval(session.steps)

    def after_step(self, update: Update) -> None:
        """Show the pictures, and append an entry if it is due."""
        session = self._session
        if update.pictures:
            with session.clock.outside_steps(useful=True, online=True):
                self._metrics.show(update.step, update.pictures)
        is_due = update.step % self._interval == 0 or update.step == session.steps
        if not (is_due or update.log_now):
            return
        low, high = session.engine.learning_rates()
        values = update.values | {
            "epoch": session.images_after(update.step) / session.images,
            "lr": high,
            "lr_lowest": low,
            "grad_norm": update.grad_norm,
        }
        speed = session.images_per_second
        timing = {"images_per_second": speed, **session.clock.timing, **update.timing}
        flops = session.stage.flops_per_image(session.encoder) * speed / session.context.world_size
        timing |= usage(flops, session.stage.precision, session.device)
        self._metrics.log(update.step, values, timing)

    def before_save(self, record: dict[str, Any]) -> None:
        """Force the entries to the disk before a state claims their steps."""
        self._metrics.sync()

    def close(self) -> None:
        """Finish the log."""
        self._metrics.close()


def usage(flops: float, precision: str, device: torch.device) -> dict[str, float]:
    """Return how much of its device this rank uses.

    Args:
        flops: operations of the model per second on this rank.
        precision: `bf16` or `fp32`.
        device: of this rank.

    Returns:
        `memory_gib`, the most that was allocated on a GPU, or this process's resident memory;
        `tflops`, 10^12 operations a second; and `utilization`, their fraction of the device's dense
        bfloat16 rate, if that is known and the precision is bfloat16.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(device)
    else:
        memory = psutil.Process().memory_info().rss
    values = {"memory_gib": memory / 2**30, "tflops": flops / 1e12}
    if on_gpu and precision == "bf16":
        peak = peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            values["utilization"] = flops / peak
    return values
