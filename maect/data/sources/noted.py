"""Names, sizes and times of the files that images were sharded from, noted beside the shards."""

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
"""Files that are compared again: more would delay every start."""

Stat = tuple[int, int]
"""Bytes of a file and when it was changed, in nanoseconds; -1 and 0 of one that is gone."""


def note_files(out: Path, source: ImageSource, entries: Sequence[Entry]) -> None:
    """Write beside shards names, sizes and times of the files with the images.

    Of more than `MOST` files only the names of their class folders.
    """
    if len({source.file_of(entry) for entry in entries}) <= MOST:
        write_record(out / FILES, {"files": dict(sorted(file_stats(source, entries).items()))})
    elif folders := source.folder_names():
        write_record(out / FILES, {"folders": [*folders]})


def file_stats(source: ImageSource, entries: Iterable[Entry]) -> dict[str, Stat]:
    """Return the size and time of each file that images are in."""
    stats = {}
    for name in {source.file_of(entry) for entry in entries}:
        try:
            status = os.stat(source.root / name)
            stats[as_utf8(name)] = status.st_size, status.st_mtime_ns
        except OSError:
            stats[as_utf8(name)] = -1, 0
    return stats


def read_noted(out: Path) -> tuple[dict[str, Stat] | None, list[str] | None]:
    """Return what `note_files` wrote: of files, or of class folders."""
    if not (out / FILES).exists():
        return None, None
    try:
        noted = read_record(out / FILES)
    except UserError as error:
        log.warning("%s", error)
        raise
    files = noted.get("files")
    stats = None if files is None else {name: (size, time) for name, (size, time) in files.items()}
    return stats, noted.get("folders")
