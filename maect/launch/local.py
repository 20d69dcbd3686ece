"""Jobs on this machine: one process for each rank, recognised by a mark in its environment."""

import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from maect.core.resources import Resources
from maect.launch import record
from maect.launch.record import Job, LaunchError
from maect.launch.shell import MARK, environment
from maect.launch.state import Cluster, Notice, check_site

BROKEN_GRACE = 2.0  # seconds for the other ranks to end by themselves once one has died


def find_processes(name: str) -> list[psutil.Process]:
    """Return all live processes of the job of this name."""
    found = (_find_process(pid, name) for pid in psutil.pids())
    return [process for process in found if process is not None]


class Local(Cluster):
    """This machine."""

    interval = 0.5
    record_patience = 3.0

    def site(self) -> str:
        """Return the machine's name."""
        return socket.gethostname()

    def submit(self, folder: Path, job: Job, resources: Resources) -> None:
        """Start the ranks, each in a session of its own: a Ctrl-C here does not reach them."""
        python = shlex.split(resources.python) or [sys.executable]
        words = [*python, "-P", "-u", "-m", "maect.launch.worker", str(folder), job.name]
        variables = environment(job.name, job.cpus)
        for rank in range(job.ranks):
            output = record.log(folder, job, rank)
            try:
                with output.open("ab") as log:
                    process = subprocess.Popen(
                        [*words, str(rank), str(job.ranks)],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                self.end(folder, job)
                what = output if error.filename == str(output) else shlex.join(python)
                raise LaunchError(f"{what}: {error.strerror}") from None
            job.pids.append(process.pid)
        job.id = str(job.pids[0])

    def poll(self, folder: Path, job: Job) -> Notice:
        """Look for the processes of a job's ranks."""
        check_site(job, self.site())
        if job.pids:
            alive = [_find_process(pid, job.name) is not None for pid in job.pids]
        else:  # its launcher died before it noted them, or before it had started them all
            started = {_rank_of(process) for process in find_processes(job.name)}
            alive = [rank in started for rank in range(job.ranks)]
            if not any(alive):
                return Notice("ended", "never started")
        reports = record.ranks(folder, job)
        for rank, is_alive in enumerate(alive):
            end = reports[rank].end if rank in reports else None
            if end == "error" or (end is None and not is_alive):
                # The others may wait for it for ever.
                how = "failed" if end else "died (killed, or out of memory?)"
                return Notice("ended", f"rank {rank} {how}", BROKEN_GRACE if any(alive) else 0.0)
        if not any(alive):
            return Notice("ended", "its processes have ended")
        return Notice("running") if reports else Notice("pending", "starting")

    def has_left(self, folder: Path, job: Job) -> bool:
        """Return whether all processes of a job have ended."""
        return not find_processes(job.name)

    def end(self, folder: Path, job: Job) -> bool:
        """Kill a job's processes, data loaders included."""
        # Repeated: a process may have started another between the scan and the signal.
        for _ in range(3):
            left = find_processes(job.name)
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
            if not left:
                break
        return True


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


def _rank_of(process: psutil.Process) -> int | None:
    """Return the rank that a process was started for, the last but one word of its command."""
    with suppress(psutil.Error, IndexError, ValueError):
        return int(process.cmdline()[-2])
    return None
