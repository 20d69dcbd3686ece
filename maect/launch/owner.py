"""One launcher per run folder, and when it leaves: on a signal, or once its Snakemake is gone."""

import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType

from maect.core.files import make_folder
from maect.launch.record import LaunchError

# Seconds; a launcher whose Snakemake was killed ends within two, unless SLURM keeps it waiting.
PATIENCE = 75.0
WARN_AFTER = 3.0
TOGETHER = 1.0  # seconds: SIGTERM of a whole group arrives again by way of `maect run`
SNAKEMAKE = "MAECT_SNAKEMAKE"  # process id and start time of the Snakemake that began it all

log = logging.getLogger(__name__)


@contextmanager
def lock_folder(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock on `folder/owner.lock`; LaunchError if another launcher keeps it.

    The kernel frees it however this process ends.
    """
    make_folder(folder)
    path = folder / "owner.lock"
    # Whoever may open it may lock it and keep every launcher out: nobody but the group.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o660)
    with open(descriptor, "a+", encoding="utf-8") as file:
        start = time.monotonic()
        warned = False
        while not _lock(file.fileno(), folder):
            waited = time.monotonic() - start
            if waited >= patience:
                raise LaunchError(
                    f"{folder} belongs to {_owner(path)}: wait until that ends, or stop it"
                )
            if waited > WARN_AFTER and not warned:
                log.warning("%s belongs to %s: waiting", folder, _owner(path))
                warned = True
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
        log.warning(
            "%s cannot be locked (%s): do not start two pipelines on it", folder, error.strerror
        )
    return True


def _owner(path: Path) -> str:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return f"process {value['pid']} on {value['host']}, running since {value['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another launcher"


def this_process() -> str:
    """Return this process as `MAECT_SNAKEMAKE` names it."""
    return f"{os.getpid()} {_start_ticks(os.getpid())}"


def is_snakemake_alive() -> bool:
    """Return whether the Snakemake that `MAECT_SNAKEMAKE` names lives; True if it names none."""
    words = os.environ.get(SNAKEMAKE, "").split()
    if len(words) != 2 or not all(map(str.isdecimal, words)):
        return True
    return _start_ticks(int(words[0])) == words[1]


def _start_ticks(pid: int) -> str | None:
    """Return when a live process began, in the kernel's ticks; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold anything.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


class Interruption(AbstractContextManager["Interruption"]):
    """Ctrl-C and SIGTERM stop the job; SIGHUP and the death of Snakemake leave it running.

    Several within a second count once.
    """

    def __init__(self) -> None:
        self.stops = 0  # how often we were asked to stop the job
        self._stopped_at = -TOGETHER  # when that was
        self._detached = False

    def __enter__(self) -> "Interruption":
        handlers = {
            signal.SIGINT: self._stop,
            signal.SIGTERM: self._stop,
            signal.SIGHUP: self._leave,
        }
        # Below nohup Snakemake goes on after a hang-up, and needs its launchers.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        self._before = {number: signal.signal(number, to) for number, to in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason_to_leave(self) -> str | None:
        """Return why to leave the job running and end, or None."""
        if self._detached:
            return "detached"
        return None if is_snakemake_alive() else "Snakemake is gone"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._stopped_at >= TOGETHER:
            self.stops += 1
            self._stopped_at = now

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._detached = True
