"""Jobs on this machine: submitit's local controller and its ranks, recognised by their mark."""

import platform
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from maect.launch import record
from maect.launch.record import Job
from maect.launch.rendezvous import remove_folder
from maect.launch.resources import LaunchError
from maect.launch.state import Cluster, Notice
from maect.launch.submit import MARK

BROKEN_GRACE = 2.0  # seconds for the other ranks to end by themselves once one has died
TEARDOWN = 30.0  # seconds for the ranks to leave after they have returned
START = 120.0  # seconds until the first rank of a job in another container is there
FIRST_NAMESPACE = "pid:[4026531836]"  # of process ids, outside of all containers (Linux's number)


def marked(name: str) -> list[psutil.Process]:
    """All live processes of the job of this name."""
    return [process for pid in psutil.pids() if (process := _alive(pid, name)) is not None]


class Local(Cluster):
    """This machine."""

    interval = 0.5
    record_patience = 3.0
    out_of_reach = "its processes are in another container"

    def poll(self, folder: Path, job: Job) -> Notice:
        """Return the state of a local job.

        Raises:
            LaunchError: it was started on another machine, where we cannot see.
        """
        if job.boot != record.boot():
            if _has_restarted_since(job):
                return Notice("ended", "the machine was restarted")
            raise _elsewhere(folder, job)
        if record.is_hidden(folder):
            return Notice("unknown", "only the user who started its job can see whether it runs")
        if job.namespace != record.namespace():
            return self._from_outside(folder, job)
        if job.id is None:
            return (
                Notice("unknown", "starting")
                if marked(job.name)
                else Notice("ended", "never started")
            )
        controller = _alive(int(job.id), job.name)
        ranks = record.ranks(folder, job)
        live = {rank for rank, report in ranks.items() if _alive(report.pid, job.name)}
        for rank, report in sorted(ranks.items()):
            if report.end == "error" or (report.end is None and rank not in live):
                how = "failed" if report.end else "died (killed, or out of memory?)"
                grace = BROKEN_GRACE if live or controller else 0.0
                return Notice("ended", f"rank {rank} {how}", grace, rank)
        if controller is None:
            return Notice("running") if live else Notice("ended", "its processes have ended")
        if 0 < len(ranks) < job.ranks:
            # A rank that died before it could say that it had started.
            gone = sum(report.end is not None for report in ranks.values())
            if _children(controller) < job.ranks - gone:
                missing = min(set(range(job.ranks)) - set(ranks))
                return Notice(
                    "ended", f"rank {missing} died at its start", 2 * BROKEN_GRACE, missing
                )
        return Notice("running" if ranks else "pending", "" if ranks else "starting")

    def _from_outside(self, folder: Path, job: Job) -> Notice:
        """Look at a job of another container: by the locks of its ranks, which one kernel keeps."""
        lives = record.lives(folder, job)
        if lives is None:
            raise _elsewhere(folder, job)
        if lives:
            return Notice("running", "in another container")
        if not record.ranks(folder, job) and time.time() - job.submitted < START:
            return Notice("unknown", "starting in another container")
        return Notice("ended", "its processes have ended")

    def finish(self, folder: Path, job: Job) -> None:
        """Let the ranks of a job leave that has returned."""
        _end(job.name, TEARDOWN)

    def end(self, folder: Path, job: Job) -> bool:
        """Kill a job's processes, data loaders included; False if they are out of sight."""
        _end(job.name, 0.0)
        if job.namespace != record.namespace() and record.lives(folder, job):
            return False
        remove_folder(folder, job.name)
        return True


def _has_restarted_since(job: Job) -> bool:
    """Return whether this is the machine of a job, and its kernel began later than that.

    Only outside of containers, of which several machines may have some of one name; Windows runs
    all of Linux in one.
    """
    outside = job.namespace == record.namespace() == FIRST_NAMESPACE
    return (
        (outside or "microsoft" in platform.release())
        and job.host == socket.gethostname()
        and job.submitted < psutil.boot_time()
    )


def _elsewhere(folder: Path, job: Job) -> LaunchError:
    same = job.host == socket.gethostname()
    where = f"another machine or container called {job.host}" if same else job.host
    return LaunchError(
        f"{folder}: its job {job.name} was started on {where}; resume there, or "
        f"delete {folder / 'job.json'} if that is gone for good, or this a copy"
    )


def _end(name: str, seconds: float) -> None:
    """Wait for a job's processes to end, and kill what is left then."""
    deadline = time.monotonic() + seconds
    while (left := marked(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Repeated: a process may have started another between the scan and the signal.
    for _ in range(3):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        left = marked(name)
        if not left:
            break


def _children(process: psutil.Process) -> int:
    try:
        return len(process.children())
    except psutil.Error:
        return 0


def _alive(pid: int, name: str) -> psutil.Process | None:
    # The mark, not the number: process ids are used again.
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{MARK}={name}".encode() not in file.read().split(b"\0"):
                return None
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (OSError, psutil.Error):
        return None
