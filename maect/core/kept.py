"""Finished files that Snakemake deletes before a job starts, kept as backups.

A job runs when its inputs are newer, its arguments changed, or Snakemake was killed while it ran.
If what was there is what it is asked for, it puts that back, and hours are not computed again. What
no job looked at is put back when Snakemake ends or starts again, and by whoever reads an encoder.
The backup, `.NAME.kept`, lies beside the first: some file systems link within a folder only.
"""

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from maect.core.errors import UserError, did_you_mean
from maect.core.files import RUN, seek_record

SUFFIX = ".kept"

log = logging.getLogger(__name__)


def keep(paths: Sequence[Path]) -> bool:
    """Give a job's files backups, if all of them are there; whether all of them have one."""
    if not all(path.is_file() for path in paths):
        return False  # what was kept before is still the last whole set
    for path in paths:
        backup_of(path).unlink(missing_ok=True)
        with suppress(OSError):  # a file system without hard links: the job computes it again
            os.link(path, backup_of(path))
    return all(backup_of(path).exists() for path in paths)


def kept(folder: Path) -> list[Path]:
    """First names of what is kept of a folder."""
    return sorted(
        path.with_name(path.name[1:].removesuffix(SUFFIX)) for path in folder.glob(f".*{SUFFIX}")
    )


def put_back(paths: Sequence[Path], is_finished: Callable[[], bool]) -> None:
    """Put back files that are gone and kept, if `is_finished` finds them to be what is asked for.

    Where one of the job's `paths` has been written since, nothing is put back beside it.
    """
    gone = [path for path in paths if not path.exists()]
    here = [path for path in paths if path not in gone]
    if not gone or not all(backup_of(path).exists() for path in gone):
        return
    if any(backup_of(path).exists() and not _is_backup(path, path) for path in here):
        return
    for path in gone:
        with suppress(FileExistsError):  # by a job that nobody watched
            os.link(backup_of(path), path)
    damaged = False
    try:
        if is_finished():
            return
    except (UserError, KeyError, TypeError, ValueError) as error:
        log.warning("%s: damaged, so it is made again (%s)", gone[0], error)
        damaged = True
    for path in gone:
        _take_back(path)
    if damaged:
        forget(gone)


def restore(root: Path) -> None:
    """Put back, in a results folder, the results that no job checked.

    Shards are left to their jobs, which a start asks for: only a plan says whether they fit.
    """
    for kind in ("runs", "features", "evaluations"):
        for folder in {backup.parent for backup in root.glob(f"{kind}/*/.*{SUFFIX}")}:
            with suppress(OSError):  # gone, or its job is at work on it
                _restore(folder)


def _restore(folder: Path) -> None:
    """Put back what is kept of a run, or of each of the features or evaluations in a folder."""
    if backup_of(folder / RUN).exists():
        put_back(kept(folder), lambda: _is_of_last_recipe(folder))
        return
    results: dict[str, list[Path]] = {}
    for path in kept(folder):
        results.setdefault(path.stem, []).append(path)
    for paths in results.values():
        put_back(paths, lambda: True)


def _is_of_last_recipe(run: Path) -> bool:
    """Return whether no training by another recipe has begun since a run was finished."""
    made, begun = (seek_record(run / name) for name in (RUN, "recipe.json"))
    if not begun and made.get("stage") == "import":  # which has none
        return True
    return made.get("fingerprint") == begun.get("fingerprint")


def _take_back(path: Path) -> None:
    """Remove a file that was put back, and not what a job has written there since."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    os.rename(path, aside)
    if _is_backup(path, aside):
        aside.unlink()
    else:
        os.rename(aside, path)


def tidy(root: Path) -> None:
    """Give up, in a results folder, the backups of files that Snakemake did not delete."""
    for pattern in ("runs/*", "features/*", "evaluations/*", "shards/*/*"):
        for folder in {second.parent for second in root.glob(f"{pattern}/.*{SUFFIX}")}:
            for path in kept(folder):
                with suppress(OSError):  # gone, or its job is at work on it
                    if _is_backup(path, path):
                        forget([path])


def forget(paths: Sequence[Path]) -> None:
    """Give up the backups of files that are finished."""
    for path in paths:
        backup_of(path).unlink(missing_ok=True)


def set_aside(paths: Sequence[Path]) -> None:
    """Link finished files into `before-forcerun` beside them, as they are made again from nothing.

    What is there of an earlier time is replaced.
    """
    for path in filter(Path.is_file, paths):
        folder = path.parent / "before-forcerun"
        folder.mkdir(exist_ok=True)
        (folder / path.name).unlink(missing_ok=True)
        with suppress(OSError):  # a file system without hard links
            os.link(path, folder / path.name)


def backup_of(path: Path) -> Path:
    """The backup of a file."""
    return path.with_name(f".{path.name}{SUFFIX}")


def standing(path: Path) -> Path:
    """The file under the name that it has now: its backup while Snakemake asks for it anew."""
    return path if path.exists() or not backup_of(path).exists() else backup_of(path)


def need_encoder(path: Path) -> None:
    """Put an encoder's file back if it is put aside; UserError, with a reason, if it is gone."""
    if path.exists():
        return
    if backup_of(path).exists():
        with suppress(OSError):  # somebody else's folder
            _restore(path.parent)
        if path.exists():
            return
        raise UserError(
            f"{path}: put aside by its pipeline, which is at work on it or was killed; wait, or "
            "start it again"
        )
    run = path.parent
    if not run.exists() and run.parent.is_dir():
        others = [other.parent.name for other in run.parent.glob(f"*/{path.name}")]
        if others:
            raise UserError(f"{run}: no such run; {did_you_mean(run.name, others)}")
    unlike = run.is_dir() and not (run / "config.yaml").exists() and any(run.iterdir())
    hint = " (images come after the encoder)" if unlike else ""
    raise UserError(f"{path}: no such encoder; train or import the run first{hint}")


def _is_backup(path: Path, other: Path) -> bool:
    """Return whether `other` and the backup of `path` are one file."""
    backup = backup_of(path)
    return backup.exists() and other.samefile(backup)
