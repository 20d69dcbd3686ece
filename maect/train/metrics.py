"""`metrics.jsonl` and TensorBoard: exactly one entry per logged step, whatever was interrupted."""

import json
import os
from pathlib import Path
from typing import Any

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
        """Go on after `step`; later entries, of an attempt that was interrupted, are dropped."""
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


def entries(path: Path) -> list[dict[str, Any]]:
    """Whole entries of a metrics file, oldest first; what a kill cut off is left out."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found


def last_device_seconds(path: Path) -> float:
    """Device time spent according to the last entry, over all attempts."""
    all_entries = entries(path)
    return float(all_entries[-1]["timing"]["device_seconds"]) if all_entries else 0.0


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
