"""A run's folder: whose files are in it, whether they are finished, and who may write there."""

import fcntl
import itertools
import logging
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import maect
from maect.core.context import Context
from maect.core.errors import MissingFileError, SupersededError, UserError
from maect.core.files import (
    fsync_path,
    make_folder,
    read_record,
    write_record,
    write_text,
)
from maect.core.settings import digest
from maect.data.decode import decoder_name
from maect.data.index import Index
from maect.records import ENCODER, RunRecord, checked_sha256
from maect.records import is_finished as has_record

log = logging.getLogger(__name__)

PACKAGES = ("maect", "torch", "deepspeed", "timm", "numpy", "scipy", "pillow")
_MOVED = (
    "state", "metrics.jsonl", "tensorboard", "online", "source.diff", "recipe.json",
)  # fmt: skip
"""Files that are moved if another recipe takes the folder over, after the run's outputs."""
_HINT_NO_RECIPE = (
    "move recipe.json and metrics.jsonl away: the run goes on from its state, if it has one, with "
    "a new log, and does not know what computed it before"
)
RECORD = (RunRecord.path(Path()).name,)
WRITER_LOCK = "writer.lock"
LOCK_PATIENCE = 60.0
"""Seconds to wait for a lock: a job that has it longer is stuck on a lost node."""


def source_files(source: Path | None) -> dict[str, str]:
    """Return the checksums of the weights to start from; UserError if unfinished or damaged."""
    if source is None:
        return {}
    if not (source / ENCODER).exists():
        raise UserError(f"{source}: no encoder.safetensors: the run to start from is not finished")
    given = RunRecord.of(source).sha256 if has_record(source) else (ENCODER,)
    return {name: checked_sha256(source / name) for name in given}


def reused_sample_fields(folder: Path, split: Index) -> list[str]:
    """Return which of a run's sample `ids` and `labels` mean something else in this split.

    A view of a data set keeps the ids and numbers its classes anew.
    """
    record = RunRecord.find(folder)
    if record is None or record.index_digest in (None, split.digest):
        return []
    there, here = {record.index_digest, record.view_of}, {split.digest, split.view_of}
    return ["labels"] if (there & here) - {None} else ["ids", "labels"]


def is_finished(folder: Path, identity: str) -> bool:
    """Return whether this very run is finished, and all files that its record lists exist."""
    record = _complete_record(folder)
    return record is not None and not replaced(folder, identity) and record.fingerprint == identity


def _complete_record(folder: Path) -> RunRecord | None:
    """Return the completion record if all files that it lists exist, else None.

    It is read, since a client of NFS may still list a file that was removed.
    """
    try:
        record = RunRecord.of(folder)
    except MissingFileError:
        return None
    return record if all((folder / name).exists() for name in record.files) else None


def remove_states(folder: Path) -> None:
    """Delete the states of a finished run, also if a kill has left a part of them."""
    if "saved" in read_notes(folder):  # first, or the states would count as lost
        write_notes(folder, saved=None)
    shutil.rmtree(folder / "state", ignore_errors=True)


def check_weights(folder: Path) -> None:
    """Compare the weights of a finished run with its record; UserError if a file is damaged."""
    for name in RunRecord.of(folder).sha256:
        checked_sha256(folder / name)


def replaced(folder: Path, identity: str) -> str | None:
    """Return a sentence on how a start replaces another recipe's files; None: it does not."""
    known = read_notes(folder)
    other = known.get("fingerprint")
    if not known or other == identity:
        return None
    before = folder / f"stale-{identity}"
    back = f"; what stale-{identity} has is put back" if before.exists() else ""
    return (
        f"{folder}: recipe, seed, data or source changed since it was trained; what it left is "
        f"kept in stale-{other}{back}"
    )


def take_over_folder(folder: Path, identity: str, recipe: dict[str, Any]) -> None:
    """Take over the folder for this run: move another recipe's files, and write `recipe.json`.

    For rank 0, before anything is read.

    Args:
        folder: of the run.
        identity: fingerprint of the run.
        recipe: its description.

    Raises:
        UserError: there is a log, and no record of whose it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "recipe.json"
    notes = {"fingerprint": identity, **recipe}
    change = replaced(folder, identity)
    if change is not None:
        log.warning("%s", change)
        other = str(read_notes(folder).get("fingerprint"))
        aside = folder / f"stale-{other}"
        aside.mkdir(exist_ok=True)
        _move(folder, aside)
    before = folder / f"stale-{identity}"
    # Set aside by another recipe, or a kill interrupted putting it back.
    if before.exists() and not (known.exists() and (before / known.name).exists()):
        _move(before, folder, back=True)
        with suppress(OSError):  # other files stay in it
            before.rmdir()
    if known.exists():
        old = read_notes(folder)
        notes |= {key: old[key] for key in ("saved", "attempts") if key in old}
    elif (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder}: has a log (metrics.jsonl) and no recipe.json that says whose: put that "
            f"back from a copy, or {_HINT_NO_RECIPE}"
        )
    changes = _git("diff", "HEAD")
    if changes:
        write_text(folder / "source.diff", changes)
    write_record(known, notes)


def read_notes(folder: Path) -> dict[str, Any]:
    """Read a run's `recipe.json`; {} without one, UserError if it is damaged."""
    try:
        return read_record(folder / "recipe.json", f"put it back from a copy, or {_HINT_NO_RECIPE}")
    except MissingFileError:
        return {}


def write_notes(folder: Path, **values: Any) -> None:
    """Add values to a run's `recipe.json`, and remove those that are None."""
    record = read_notes(folder) | values
    write_record(
        folder / "recipe.json", {key: value for key, value in record.items() if value is not None}
    )


def check_not_lost(folder: Path) -> None:
    """Raise UserError if there is no state although `recipe.json` names one."""
    step = read_notes(folder).get("saved")
    if step:
        raise UserError(
            f"{folder / 'state'}: no state, and the state of step {step} was saved: put `state` "
            "back from a copy, or delete recipe.json and metrics.jsonl beside it to train from "
            "the beginning"
        )


def origin() -> dict[str, Any]:
    """Return versions of the software, and the revision of the source if it is a checkout."""
    # Imported here, since the launcher reads this module without torch.
    import torch

    from maect.models.kernels import bfloat16_on

    versions = {
        "python": platform.python_version(),
        "decoder": decoder_name(),
        "bfloat16": bfloat16_on("cuda" if torch.cuda.is_available() else "cpu"),
    }
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except ImportError:
            versions[package] = getattr(maect, "__version__", "unknown")
    with suppress(ImportError):  # optional
        versions["flash_attn"] = version("flash_attn")
    revision = _git("rev-parse", "HEAD").strip()
    if revision and _git("status", "--porcelain", "--untracked-files=no"):
        revision += f"-dirty-{digest(_git('diff', 'HEAD'))}"
    return {"versions": versions, "source_revision": revision or None}


def _move(folder: Path, to: Path, back: bool = False) -> None:
    """Move a run's files: the record first and the recipe last, or the other way round if `back`.

    The next start completes a move that a kill interrupted. The recipe says whose files are in the
    folder, and in a `stale-` folder without a recipe.
    """
    records = [RunRecord.find(path) for path in (folder, to)]
    outputs = [record.files for record in records if record is not None]
    names = [*RECORD, *itertools.chain(*outputs), *_MOVED]
    if back:
        names.reverse()
    for name in names:
        if (folder / name).exists() and not (to / name).is_dir():
            (folder / name).rename(to / name)


def _git(*arguments: str) -> str:
    """Return the output of git on the source's checkout; empty if there is none."""
    checkout = Path(maect.__file__).parent
    if not (checkout.parent / ".git").exists():  # installed, perhaps below somebody's own project
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_is_current(context: Context) -> None:
    """Raise SupersededError if the launcher's record names another job."""
    if not context.is_current():
        raise SupersededError("the launcher has replaced this job by another one")


class RunLock:
    """Rank 0's right to write below a run's folder, which only the newest of its jobs has.

    A launcher that was wrong may have started a second job beside a live one, and SLURM may start a
    job again while a node that it takes for dead still computes. One file in the run's folder names
    the job that began last. Each write looks there first, and a lock on that file keeps a job from
    taking over in the middle of it: the newer job wins, the older one ends at its next save.
    """

    def __init__(self, folder: Path, context: Context) -> None:
        """Take the right; SupersededError if the launcher's record names another job."""
        self._context = context
        self._file = folder / WRITER_LOCK
        # New each time, since SLURM may start the same job again.
        self._own = uuid.uuid4().hex
        make_folder(folder)
        check_is_current(self._context)
        with self._locked(os.O_CREAT) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._own.encode(), 0)
            os.fsync(descriptor)

    def check(self) -> None:
        """Raise SupersededError if another job has the right."""
        with self._locked_by_us():
            pass

    def commit(self, path: Path, value: dict[str, Any]) -> None:
        """Write a record under the lock; SupersededError if another job has the right."""
        with self._locked_by_us():
            write_record(path, value)
            # Another rank may have made this folder without forcing it to the disk yet.
            fsync_path(path.parent.parent)

    @contextmanager
    def _locked_by_us(self) -> Iterator[None]:
        check_is_current(self._context)
        with self._locked() as descriptor:
            if os.pread(descriptor, len(self._own), 0) != self._own.encode():
                raise SupersededError(f"{self._file.parent}: another job has taken the run over")
            yield

    @contextmanager
    def _locked(self, more: int = 0) -> Iterator[int]:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC | more, 0o660)
        except FileNotFoundError:
            raise SupersededError(f"{self._file}: gone, with the folder of the run") from None
        try:
            _lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)  # releases the lock


def _lock(descriptor: int) -> None:
    """Lock a file if its file system can; without a lock, a stale job may still end one save."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return
