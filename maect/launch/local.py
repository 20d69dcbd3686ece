"""Jobs on this machine: submitit's local controller and its ranks, recognised by their mark."""

import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from maect.launch import record
from maect.launch.record import Job, RankReport
from maect.launch.resources import LaunchError
from maect.launch.state import Cluster, Notice
from maect.launch.submit import MARK

BROKEN_GRACE = 2.0  # seconds for the other ranks to end by themselves once one has died
TEARDOWN = 30.0  # seconds for the ranks to leave after they have returned


def find_processes(name: str) -> list[psutil.Process]:
    """Return all live processes of the job of this name."""
    found = (_find_process(pid, name) for pid in psutil.pids())
    return [process for process in found if process is not None]


class Local(Cluster):
    """This machine."""

    interval = 0.5
    record_patience = 3.0
    out_of_reach = "its processes are in another container"

    def poll(self, folder: Path, job: Job) -> Notice:
        """Look for a job's processes.

        Raises:
            LaunchError: it was started on another machine.
        """
        if job.boot != record.boot():
            if job.host == socket.gethostname():
                return Notice("ended", "the machine was restarted")
            raise LaunchError(
                f"{folder}: its job {job.name} was started on {job.host}; resume there, or "
                f"delete {folder / 'job.json'} if that is gone for good"
            )
        if record.is_hidden(folder):
            return Notice("unknown", "only the user who started its job can see whether it runs")
        if job.id is None:
            if find_processes(job.name):
                return Notice("unknown", "starting")
            return Notice("ended", "never started")
        controller = _find_process(int(job.id), job.name)
        ranks = record.ranks(folder, job)
        live = {rank for rank, report in ranks.items() if _find_process(report.pid, job.name)}
        if controller is None and not live and record.has_live_rank(folder, job):
            return Notice("running", "in another container")
        if broken := _broken_rank(ranks, live, controller, job.ranks):
            return broken
        if controller is None and not live:
            return Notice("ended", "its processes have ended")
        return Notice("running") if ranks else Notice("pending", "starting")

    def finish(self, folder: Path, job: Job) -> None:
        """Let the ranks of a job leave that has returned."""
        _end(job.name, TEARDOWN)

    def end(self, folder: Path, job: Job) -> bool:
        """Kill a job's processes, data loaders included; return False if they are out of sight."""
        _end(job.name, 0.0)
        return not record.has_live_rank(folder, job)


def _broken_rank(
    ranks: dict[int, RankReport], live: set[int], controller: psutil.Process | None, size: int
) -> Notice | None:
    """Return the end of a job that has lost a rank: the others may wait for it for ever."""
    for rank, report in sorted(ranks.items()):
        if report.end == "error" or (report.end is None and rank not in live):
            how = "failed" if report.end else "died (killed, or out of memory?)"
            grace = BROKEN_GRACE if live or controller else 0.0
            return Notice("ended", f"rank {rank} {how}", grace, rank)
    if controller is not None and 0 < len(ranks) < size:
        # A rank that died before it could report.
        gone = sum(report.end is not None for report in ranks.values())
        if _count_children(controller) < size - gone:
            missing = min(set(range(size)) - set(ranks))
            return Notice("ended", f"rank {missing} died at its start", 2 * BROKEN_GRACE, missing)
    return None


def _end(name: str, seconds: float) -> None:
    """Wait for a job's processes to end, and kill what is left then."""
    deadline = time.monotonic() + seconds
    while (left := find_processes(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Repeated: a process may have started another between the scan and the signal.
    for _ in range(3):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        left = find_processes(name)
        if not left:
            break


def _count_children(process: psutil.Process) -> int:
    try:
        return len(process.children())
    except psutil.Error:
        return 0


def _find_process(pid: int, name: str) -> psutil.Process | None:
    """Return the process of this id if it is alive and has the job's mark: ids are used again."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{MARK}={name}".encode() not in file.read().split(b"\0"):
                return None
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (OSError, psutil.Error):
        return None
