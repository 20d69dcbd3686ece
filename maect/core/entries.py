"""Entries of a run's log, `metrics.jsonl`: a line of JSON for each logged step."""

import json
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import RUN, open_file, sha256_file

LOGGED_EVERY_STEP = 10_000
"""Runs longer than this many steps log every 50th."""


def log_interval(steps: int) -> int:
    """Return how many steps lie between two entries."""
    return 1 if steps <= LOGGED_EVERY_STEP else 50


def line_of(step: int, values: dict[str, float], timing: dict[str, float]) -> str:
    """Return the line of a step."""
    return json.dumps({"step": step, **values, "timing": timing}) + "\n"


def entries(path: Path, tail: int | None = None, sha256: str | None = None) -> list[dict[str, Any]]:
    """Return the entries of a log, oldest first; [] without a file.

    Lines that are no entries are left out: a training that is killed, or at work, may not have
    written all of the last one.

    Args:
        tail: read only this many bytes at its end.
        sha256: of the log of a finished run, as its record has it.

    Raises:
        UserError: the log is not that of the record.
    """
    try:
        if sha256 is not None and sha256_file(path) != sha256:
            raise UserError(
                f"{path}: damaged (its checksum is not that in {RUN}); put it back from a copy, or "
                "delete it: what reads the log goes on without it"
            )
        with open_file(path) as file:
            start = max(0, path.stat().st_size - tail) if tail is not None else 0
            file.seek(start)
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    if start:
        del lines[0]  # the end of a line
    found = [_entry_of(line) for line in lines]
    return [entry for entry in found if entry is not None]


def _entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line; None if it has none."""
    try:
        entry: dict[str, Any] = json.loads(line)
        timing = entry["timing"]
        timing.pop("crc32", None)  # of logs of earlier versions
        is_entry = type(entry["step"]) is int and isinstance(timing["device_seconds"], float | int)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if is_entry else None
