"""Note name, size and time of each file that images were sharded from, and read the notes."""

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import read_record, write_record
from maect.data.sources.base import Entry, ImageSource, as_utf8

log = logging.getLogger(__name__)

FILES = "files.json"
MOST = 50_000
"""Files that a start compares: more would delay it."""

Stat = tuple[int, int]
"""Size of a file in bytes, and its time of change in nanoseconds; -1 and 0 if it is gone."""


def note_files(out: Path, source: ImageSource, entries: Sequence[Entry]) -> None:
    """Write the names, sizes and times of the images' files beside their shards.

    Of more than `MOST` files, write only the names of their class folders.
    """
    if len({source.file_of(entry) for entry in entries}) <= MOST:
        write_record(out / FILES, {"files": dict(sorted(file_stats(source, entries).items()))})
        return
    folders = source.folder_names()
    if folders:
        write_record(out / FILES, {"folders": [*folders]})


def file_stats(source: ImageSource, entries: Iterable[Entry]) -> dict[str, Stat]:
    """Return size and time of each file that has some of the images."""
    stats = {}
    for name in {source.file_of(entry) for entry in entries}:
        try:
            status = os.stat(source.root / name)
            stats[as_utf8(name)] = status.st_size, status.st_mtime_ns
        except OSError:
            stats[as_utf8(name)] = -1, 0
    return stats


def read_notes(out: Path) -> tuple[dict[str, Stat] | None, list[str] | None]:
    """Return what `note_files` wrote: stats of files, or names of class folders.

    Raises:
        UserError: the notes are damaged. A warning says so, too.
    """
    if not (out / FILES).exists():
        return None, None
    try:
        notes = read_record(out / FILES)
    except UserError as error:
        log.warning("%s", error)
        raise
    files = notes.get("files")
    stats = None if files is None else {name: (size, time) for name, (size, time) in files.items()}
    return stats, notes.get("folders")
