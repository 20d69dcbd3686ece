"""What a run logs: one entry per logged step, whatever was interrupted, and its use of a device."""

import json
import os
from pathlib import Path

import psutil
import torch

from maect.core.files import json_lines
from maect.recipes.flops import peak_flops

LOGGED_EVERY_STEP = 10_000
"""Runs longer than this many steps log every 50th."""


def log_interval(steps: int) -> int:
    """How many steps lie between two entries."""
    return 1 if steps <= LOGGED_EVERY_STEP else 50


class Metrics:
    """Rank 0's record of a run.

    Values beside "timing" are a function of recipe, seed and data alone.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Resume after `step`; later entries, of an attempt that was interrupted, are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "metrics.jsonl"
        self.device_seconds = last_device_seconds(self.path)
        _truncate(self.path, step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append the entry of a step."""
        entry = {"step": step, **values, "timing": timing}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        for name, value in (values | timing).items():
            self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Force all entries to the disk; a state may only claim steps whose entries are there."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish both files."""
        self.sync()
        self._file.close()
        self._board.close()


def last_device_seconds(path: Path) -> float:
    """Device time spent according to the last entry, over all attempts."""
    entries = json_lines(path)
    return float(entries[-1]["timing"]["device_seconds"]) if entries else 0.0


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = 0
    with open(path, "r+b") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > step:
                    break
            except ValueError:
                break
            kept += len(line)
        file.truncate(kept)


def usage(flops: float, precision: str, device: torch.device) -> dict[str, float]:
    """How much of its device this rank uses.

    Args:
        flops: model operations a second on this device.
        precision: of the training.
        device: this rank's.

    Returns:
        `memory_gib`: the most that was allocated on a GPU, or this process's resident memory;
        `tflops`: 10^12 model operations a second; `utilization`: the same as a fraction of the
        device's dense bfloat16 rate, where that is known and the precision is bfloat16.
    """
    values = {"memory_gib": _memory(device) / 2**30, "tflops": flops / 1e12}
    if device.type == "cuda" and precision == "bf16":
        peak = peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            values["utilization"] = flops / peak
    return values


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
