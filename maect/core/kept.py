"""Finished files that Snakemake deletes before a job starts, kept under a second name.

A job runs when its inputs are newer, its arguments changed, or Snakemake was killed while it ran.
What it is asked for may be what was there all the same: it is put back then, and hours of computing
are not repeated.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import make_folder

FOLDER = ".kept"


def keep(paths: Sequence[Path]) -> None:
    """Give a job's files second names, if all of them are there."""
    if not all(path.is_file() for path in paths):
        return  # what was kept before is still the last whole set
    for path in paths:
        make_folder(path.parent / FOLDER)
        _second(path).unlink(missing_ok=True)
        with suppress(OSError):  # a file system without hard links: the job computes it again
            os.link(path, _second(path))


def kept(folder: Path) -> list[Path]:
    """First names of what is kept of a folder."""
    return sorted(folder / path.name for path in (folder / FOLDER).glob("*"))


def put_back(paths: Sequence[Path], is_finished: Callable[[], bool]) -> None:
    """Put back the files that are gone and kept, if they are what the job is asked for."""
    gone = [path for path in paths if not path.exists()]
    if not gone or not all(_second(path).exists() for path in gone):
        return
    for path in gone:
        with suppress(FileExistsError):  # by a job that nobody watched
            os.link(_second(path), path)
    try:
        if is_finished():
            return
    except (UserError, KeyError, TypeError, ValueError):  # damaged: it is made again
        damaged = True
    else:
        damaged = False
    for path in gone:
        _take_back(path)
    if damaged:
        forget(gone)


def _take_back(path: Path) -> None:
    """Remove a file that was put back, and not what a job has written there since."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    os.rename(path, aside)
    if aside.samefile(_second(path)):
        aside.unlink()
    else:
        os.rename(aside, path)


def tidy(root: Path) -> None:
    """Give up, in a results folder, the second names of files that Snakemake did not delete."""
    for pattern in ("runs/*", "features/*", "evaluations/*", "shards/*/*"):
        for folder in root.glob(f"{pattern}/{FOLDER}"):
            for path in kept(folder.parent):
                with suppress(OSError):  # gone, or its job is at work on it
                    if path.samefile(_second(path)):
                        forget([path])


def forget(paths: Sequence[Path]) -> None:
    """Give up the second names of files that are finished."""
    for path in paths:
        _second(path).unlink(missing_ok=True)
    for folder in {path.parent / FOLDER for path in paths}:
        with suppress(OSError):  # others' files are there, or it never was
            folder.rmdir()


def _second(path: Path) -> Path:
    return path.parent / FOLDER / path.name
