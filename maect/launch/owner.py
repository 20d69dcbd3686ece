"""One launcher per run folder, and one that knows when its Snakemake is gone."""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from maect.launch.resources import LaunchError

PATIENCE = 15.0  # seconds; a launcher whose Snakemake was killed lets go within two


@contextmanager
def own(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold `folder/owner.lock`; the kernel frees it however this process ends.

    Raises:
        LaunchError: another live launcher owns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "owner.lock").open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + patience
        while not _lock(file.fileno(), folder):
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"{folder} belongs to {_owner(file.name)}: wait until it has ended, or stop it"
                )
            time.sleep(0.2)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        file.truncate(0)
        with suppress(OSError):  # the lock counts; on a full disk its owner has no name
            os.write(file.fileno(), json.dumps(about).encode())
        try:
            yield
        finally:
            file.truncate(0)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some parallel file systems are mounted without flock: better unguarded than not at all.
        print(f"warning: {folder} cannot be locked ({error.strerror}): "
              "do not start two pipelines on it", file=sys.stderr)  # fmt: skip
    return True


def _owner(path: str) -> str:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        return f"process {value['pid']} on {value['host']}, running since {value['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another launcher"


class Ancestors:
    """The Snakemake processes that this launcher works for, if any."""

    def __init__(self) -> None:
        # is_running() compares creation times, so a reused process id does not deceive it.
        self._found = [parent for parent in psutil.Process().parents() if _is_snakemake(parent)]

    def are_alive(self) -> bool:
        """False once any of them has died."""
        return all(_is_alive(process) for process in self._found)


def _is_snakemake(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:3]
    except psutil.Error:
        return False
    return any(Path(word).name == "snakemake" for word in words)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
