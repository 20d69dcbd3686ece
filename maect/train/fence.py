"""The right to write a run's states, which only the newest of its jobs has.

A launcher that was wrong may have started a second job beside a live one. Locks do not help on file
systems that have none, and a node may see for a while what another one has long replaced. So the
right is a folder, and what counts is committed by a rename out of it. Whoever takes a run over
removes the folder of the job before it, and from then on that rename fails: both are decided by the
file system's server, whatever a node believes.
"""

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from maect.core.context import Context
from maect.core.errors import SupersededError
from maect.core.files import fsync_path, make_folder, patiently, sealed

GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}
PREFIX = "writer-"
PATIENCE = 60.0  # seconds


def check_current(context: Context) -> None:
    """Refuse to write for a job that the launcher has replaced (SupersededError)."""
    if not context.is_current():
        raise SupersededError("the launcher has replaced this job by another one")


class Fence:
    """Rank 0's right to write below a folder, taken from any job that had it before."""

    def __init__(self, folder: Path, context: Context) -> None:
        """Take the right; SupersededError if another job has it by the launcher's record."""
        self._context, self._folder = context, folder
        make_folder(folder)
        check_current(context)
        number = 1
        while True:
            others = self._numbers()
            number = max([number, *(other + 1 for other in others)])
            try:
                # Only one of two can make it, and having made it, this node sees the folder anew.
                self._path(number).mkdir()
            except FileExistsError:
                number += 1
                continue
            if max(self._numbers(), default=0) == number:
                break
            with contextlib.suppress(FileNotFoundError):  # whoever came later may have removed it
                self._path(number).rmdir()
        # Below its number a name that nobody else can have: a number may be used again.
        self._own = self._path(number) / uuid.uuid4().hex
        try:
            self._own.mkdir()
        except OSError as error:
            self._explain(error, self._own)
        for other in {*range(max(others, default=1), number), *others}:
            self._remove(self._path(other))

    def check(self) -> None:
        """Make sure that no other job has the right (SupersededError), before writing."""
        check_current(self._context)
        # Made, not searched for: a search may be answered from this node's memory.
        probe = self._write(self._own / uuid.uuid4().hex[:8], "")
        try:
            probe.unlink()
        except OSError as error:
            self._explain(error, probe)

    def commit(self, path: Path, value: dict[str, Any]) -> None:
        """Write a record, as `write_record`; SupersededError if another job has the right."""
        temporary = self._write(self._own / path.name, json.dumps(sealed(value), indent=2) + "\n")
        try:
            os.replace(temporary, path)
        except OSError as error:
            self._explain(error, temporary)
        fsync_path(path.parent)
        fsync_path(path.parent.parent)  # which may know neither of them, nor of what they replace

    def _path(self, number: int) -> Path:
        return self._folder / f"{PREFIX}{number:06d}"

    def _numbers(self) -> list[int]:
        names = patiently(os.listdir, self._folder)
        return [int(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)]

    def _remove(self, path: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while path.exists():  # its owner may be writing into it
            shutil.rmtree(path, ignore_errors=True)
            if time.monotonic() > deadline:
                raise OSError(f"{path} cannot be removed")

    def _write(self, path: Path, text: str) -> Path:
        try:
            path.write_text(text, encoding="utf-8")
            fsync_path(path)
        except OSError as error:
            self._explain(error, path)
        return path

    def _explain(self, error: OSError, path: Path) -> None:
        # Only another job removes what we wrote, and the files of a folder go before the folder.
        if error.errno in GONE and not os.path.exists(path):
            raise SupersededError(f"{self._folder}: another job has taken the run over")
        raise error
