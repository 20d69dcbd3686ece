"""Entries of a run's log, `metrics.jsonl`: one a logged step, each with a checksum of its own."""

import json
import logging
import zlib
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import open_file, parsed

LOGGED_EVERY_STEP = 10_000
"""Runs longer than this many steps log every 50th."""

log = logging.getLogger(__name__)


def log_interval(steps: int) -> int:
    """Return how many steps lie between two entries."""
    return 1 if steps <= LOGGED_EVERY_STEP else 50


def line_of(step: int, values: dict[str, float], timing: dict[str, float]) -> str:
    """Return the line of a step, with its checksum."""
    entry = {"step": step, **values, "timing": timing}
    return json.dumps(entry | {"timing": timing | {"crc32": _crc(entry)}}) + "\n"


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return its entry without the checksum, or None if it is damaged."""
    try:
        entry: dict[str, Any] = parsed(line)
        timing = entry["timing"]
        crc = timing.pop("crc32")
        sound = type(entry["step"]) is int and isinstance(timing["device_seconds"], float | int)
        return entry if sound and crc == _crc(entry) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _crc(entry: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(entry, sort_keys=True).encode()):08x}"


def lines(path: Path) -> list[bytes]:
    """Return the lines of a log with their line ends; [] without a file."""
    try:
        with open_file(path) as file:
            return file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def entries(
    path: Path, tail: int | None = None, epochs: float | None = None
) -> list[dict[str, Any]]:
    """Return the sound entries of a log, oldest first; a warning names damaged lines.

    The last line is no damage: a training that is killed, or at work, may not have written it all.

    Args:
        tail: read only this many bytes at its end.
        epochs: that the log of a finished run goes up to: its last line has been written.
    """
    try:
        with open_file(path) as file:
            start = max(0, path.stat().st_size - tail) if tail is not None else 0
            file.seek(start)
            found = [entry_of(line) for line in file.read().splitlines()[1 if start else 0 :]]
    except FileNotFoundError:
        return []
    lasting = found if epochs is not None else found[:-1]
    damaged = [str(number) for number, entry in enumerate(lasting, start=1) if entry is None]
    if damaged:
        where = " of its end" if start else ""
        log.warning("%s: damaged: left out: lines%s %s", path, where, ", ".join(damaged[:10]))
    sound = [entry for entry in found if entry is not None]
    if epochs is not None and not damaged:
        _check_end(path, sound, epochs)
    return sound


def _check_end(path: Path, found: list[dict[str, Any]], epochs: float) -> None:
    """Warn if the last entries of a finished run's log are lost."""
    if found and "epoch" not in found[-1]:
        return
    end, step = (found[-1]["epoch"], found[-1]["step"]) if found else (0.0, 1)
    # A last epoch may end with less than a batch, which no step takes.
    if (epochs - end) * step > 0.999 * end:
        log.warning("%s: the entries after epoch %.4g of %g are lost", path, end, epochs)


def finished_entries(run: Path, epochs: float) -> list[dict[str, Any]]:
    """Return all entries of a finished run; warn if the last ones are lost.

    Raises:
        UserError: an entry that is damaged, named; or a log without any.
    """
    path = run / "metrics.jsonl"
    found = []
    for number, line in enumerate(lines(path), start=1):
        entry = entry_of(line)
        if entry is None:
            raise UserError(
                f"{path}:{number}: damaged; delete the line: what reads the log goes on without it"
            )
        found.append(entry)
    if not found and path.exists():
        raise UserError(f"{path}: no step was logged")
    if found:
        _check_end(path, found, epochs)
    return found


def missing(steps: set[int], last: int, total: int) -> str:
    """Return the entries that `steps` lacks although `last` of `total` steps are done: `3-5, 9`."""
    every = log_interval(total)
    wanted = sorted({*range(every, last + 1, every), *([last] if last == total else [])})
    absent = [place for place, step in enumerate(wanted) if step not in steps]
    ranges: list[tuple[int, int]] = []
    for place in absent:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == place - 1 else place
        ranges.append((first, place))
    return ", ".join(f"{wanted[a]}-{wanted[b]}" if a < b else f"{wanted[a]}" for a, b in ranges)
