"""What a run logs: one entry per logged step, whatever was interrupted, and its use of a device."""

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image

from maect.core.files import atomic_write
from maect.recipes.flops import peak_flops

log = logging.getLogger(__name__)

LOOKS = "looks"
"""Folder of a run with the pictures of its looks."""
LOGGED_EVERY_STEP = 10_000
"""Runs longer than this many steps log every 50th."""


def log_interval(steps: int) -> int:
    """How many steps lie between two entries."""
    return 1 if steps <= LOGGED_EVERY_STEP else 50


class StepClock:
    """Seconds of steps, without what comes between them.

    Attributes:
        useful: of all whose result was kept, those of earlier attempts included. Saving is not
            useful, nor is an attempt's set-up: its first step counts as its second.
    """

    def __init__(self, useful: float) -> None:
        self.useful, self._steps = useful, 0
        self.start()

    def start(self) -> None:
        """Begin the first step of an attempt."""
        self._stepped = time.monotonic()

    @contextmanager
    def aside(self, useful: bool) -> Iterator[None]:
        """What is no part of any step: a save, or a look at the encoder, which is kept."""
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self._stepped += spent
        self.useful += spent if useful else 0.0

    def step(self) -> float:
        """How long the step took that ends now, waiting for its batch included."""
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        self._steps += 1
        self.useful += (0.0, 2.0, 1.0)[min(self._steps, 3) - 1] * seconds
        return max(seconds, 1e-9)


class Metrics:
    """Rank 0's record of a run.

    Values beside "timing" are a function of recipe, seed and data alone.
    """

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        """Resume after `step` of `steps`.

        Later entries, of an attempt that was interrupted, are dropped, and so are damaged ones.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "metrics.jsonl"
        self.device_seconds = last_device_seconds(self.path)
        _repair(self.path, step, steps)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append the entry of a step."""
        entry = {"step": step, **values, "timing": timing}
        sealed = entry | {"timing": timing | {"crc32": _crc(entry)}}
        self._file.write(json.dumps(sealed) + "\n")
        self._file.flush()
        for name, value in (values | timing).items():
            self._board.add_scalar(name, value, step)

    def show(self, step: int, pictures: dict[str, NDArray[np.uint8]]) -> None:
        """Add a step's pictures [H, W, 3], which are also files beside the metrics."""
        for name, picture in pictures.items():
            self._board.add_image(f"look/{name}", picture, step, dataformats="HWC")
            path = self.path.parent / LOOKS / f"{name}-{step:08d}.jpg"
            try:
                with atomic_write(path) as temporary:
                    Image.fromarray(picture).save(temporary, "JPEG", quality=90)
            except OSError as error:  # no more files allowed: that must not end the training
                log.warning("%s not written: %s", path, error)

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
    """Sound entries of a metrics file, oldest first."""
    found = map(_entry, path.read_bytes().splitlines()) if path.exists() else ()
    return [entry for entry in found if entry is not None]


def last_device_seconds(path: Path) -> float:
    """Device time spent according to the last entry, over all attempts."""
    logged = entries(path)
    return float(logged[-1]["timing"]["device_seconds"]) if logged else 0.0


def missing(steps: set[int], last: int, total: int) -> str:
    """Which entries are not among `steps` although `last` of `total` steps are done: `3-5, 9`."""
    every = log_interval(total)
    wanted = sorted({*range(every, last + 1, every), *([last] if last == total else [])})
    absent = [place for place, step in enumerate(wanted) if step not in steps]
    ranges: list[tuple[int, int]] = []
    for place in absent:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == place - 1 else place
        ranges.append((first, place))
    return ", ".join(f"{wanted[a]}-{wanted[b]}" if a < b else f"{wanted[a]}" for a, b in ranges)


def _repair(path: Path, step: int, steps: int) -> None:
    """Keep the sound entries up to a step, each once, and name those that are not there."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept: dict[int, bytes] = {}
    for line in lines:
        entry = _entry(line)
        if entry is not None and max(kept, default=0) < entry["step"] <= step:
            kept[entry["step"]] = line
    if absent := missing(set(kept), step, steps):
        log.warning(
            "%s: damaged or incomplete: the entries of steps %s are lost; the training is not",
            path, absent,
        )  # fmt: skip
    # Another file: one that still writes into the old one, in a job given up, writes to nowhere.
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(kept.values()))


def _entry(line: bytes) -> dict[str, Any] | None:
    """A logged entry without its checksum, or None if it is damaged."""
    try:
        entry: dict[str, Any] = json.loads(line)
        timing = entry["timing"]
        crc = timing.pop("crc32", None)  # entries of older versions have none
        sound = type(entry["step"]) is int and isinstance(timing["device_seconds"], float | int)
        return entry if sound and crc in (None, _crc(entry)) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _crc(entry: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(entry, sort_keys=True).encode()):08x}"


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
