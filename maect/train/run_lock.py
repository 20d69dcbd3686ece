"""The right to write a run, which only the newest of its jobs has.

A launcher that was wrong may have started a second job beside a live one, and SLURM may start a job
again while a node that it takes for dead still computes. One file in the run's folder names the job
that began last. Each write looks there first, and a lock on that file keeps a job from taking over
in the middle of it: the newer job wins, the older one ends at its next save.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maect.core.context import Context
from maect.core.errors import SupersededError
from maect.core.files import fsync_path, make_folder, write_record

NAME = "writer.lock"
PATIENCE = 60.0
"""Seconds to wait for a lock: a job that has it longer is stuck on a lost node."""


class RunLock:
    """Rank 0's right to write below a run's folder, taken from the job that had it before."""

    def __init__(self, folder: Path, context: Context) -> None:
        """Take the right; SupersededError if the launcher's record names another job."""
        self._context = context
        self._file = folder / NAME
        # New each time, since SLURM may start the same job again.
        self._own = uuid.uuid4().hex
        make_folder(folder)
        self._check_record()
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
        self._check_record()
        with self._locked() as descriptor:
            if os.pread(descriptor, len(self._own), 0) != self._own.encode():
                raise SupersededError(f"{self._file.parent}: another job has taken the run over")
            yield

    def _check_record(self) -> None:
        if not self._context.is_current():
            raise SupersededError("the launcher has replaced this job by another one")

    @contextmanager
    def _locked(self, more: int = 0) -> Iterator[int]:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC | more, 0o666)
        except FileNotFoundError:
            raise SupersededError(f"{self._file}: gone, with the folder of the run") from None
        try:
            _lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)  # releases the lock


def _lock(descriptor: int) -> None:
    """Lock a file if its file system can; without a lock, a stale job may still end one save."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return
