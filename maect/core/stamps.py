"""Stamps: small files that Snakemake watches, with the config and inputs of a finished result.

A job writes its stamp last: `done` beside `config.yaml`, `NAME.done` beside `NAME.yaml`. It is the
job's only output in a rule, so Snakemake deletes nothing that took hours. A start compares it with
what is asked for and with the inputs as they are: checksums decide, whatever the times of files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from maect.core.files import CHECKSUM, read_text, seek_record, sha256_file, write_record
from maect.core.settings import SettingsFile

STAMP = "done"

Checksums = Mapping[Path, str | None]
"""Checksums of files by path; None if a file is gone or unknown, which is no difference."""


class StampedFile(SettingsFile):
    """A resolved file whose job leaves a stamp."""

    @property
    def asked(self) -> str:
        """Return the identity of the file's settings."""
        return self.digest

    def made_of(self) -> Checksums:
        """Return the checksums of the inputs as they are now."""
        return {}

    def result(self, path: Path) -> str | None:
        """Return the checksum of the result of the file at `path`; None if it is not whole."""
        return ""


def stamp_path(path: Path) -> Path:
    """Return where the stamp is of the job of the resolved file at `path`."""
    return path.with_name(STAMP) if path.name == "config.yaml" else path.with_suffix(f".{STAMP}")


@contextmanager
def stamped(path: Path, config: StampedFile) -> Iterator[None]:
    """Write the stamp of a job when the block ends without an error.

    The inputs are those of when it begins.
    """
    made_of = _named(path, config.made_of())
    yield
    known = {name: value for name, value in made_of.items() if value is not None}
    stamp = {"asked": config.asked, "result": config.result(path), "made_of": known}
    write_record(stamp_path(path), stamp)


def is_current(path: Path, config: StampedFile, inputs: Checksums | None = None) -> bool:
    """Return whether a job's stamp agrees with its config and with its files as they are.

    Args:
        inputs: what some inputs are to be, in place of what they are.
    """
    stamp = seek_record(stamp_path(path))
    result = config.result(path)
    if not stamp or result is None:
        return False
    if (stamp.get("asked"), stamp.get("result")) != (config.asked, result):
        return False
    before = stamp.get("made_of", {})
    now = _named(path, {**config.made_of(), **(inputs or {})})
    return all(value in (None, before.get(name)) for name, value in now.items())


def _named(path: Path, checksums: Checksums) -> dict[str, str | None]:
    """Return checksums by paths relative to a resolved file, so that a folder can be moved."""
    folder = os.path.abspath(path.parent)
    return {os.path.relpath(file, folder): value for file, value in checksums.items()}


def known_record(path: Path) -> dict[str, Any]:
    """Return a JSON record, read once while its time stays; {} if it is gone or no record.

    Its checksum is not compared: who uses the record does that.
    """
    try:
        status = path.stat()
        return _read_record(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return {}


@cache
def _read_record(path: Path, changed: int, size: int) -> dict[str, Any]:
    value = json.loads(read_text(path))
    return value if isinstance(value, dict) else {}


def record_checksum(path: Path) -> str | None:
    """Return the checksum that a record has; None if it is gone."""
    return known_record(path).get(CHECKSUM)


def file_checksum(path: Path) -> str | None:
    """Return the sha256 of a small file, read once while its time stays; None if it is gone."""
    try:
        status = path.stat()
        return _read_sha256(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


@cache
def _read_sha256(path: Path, changed: int, size: int) -> str:
    return sha256_file(path)


def size_and_time(path: Path) -> str | None:
    """Return size and time of a large file, which tell its replacement; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
