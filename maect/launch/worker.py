"""Run a function as one rank of a job: environment, signals, reports, the verdict at its end.

`python -P -u -m maect.launch.worker FOLDER NAME [RANK RANKS]`; SLURM tells its ranks their numbers.
"""

import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from maect.core.context import Context
from maect.core.files import sealed, write_record
from maect.core.log import rank_log
from maect.launch import record
from maect.launch.record import VERDICTS, Job, LaunchError, RankReport
from maect.launch.rendezvous import Rendezvous, find_rendezvous, open_rendezvous
from maect.launch.shell import command

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
TEARDOWN_SECONDS = 60  # a rank that hangs after its function has returned is ended by force
REQUEUE_TRIES = 5


class RankFile:
    """Report of one rank, in the file that only this rank writes.

    SLURM may start a job again while a node that it takes for dead still computes: then the file is
    the newer attempt's.
    """

    def __init__(self, folder: Path, name: str, rank: int, attempt: int) -> None:
        """Begin the report of an attempt."""
        self._path = record.rank_file(folder, name, rank)
        # The thread that saves states reports here, too, beside the main thread.
        self._lock = threading.Lock()
        self._report = RankReport(rank, attempt, time.time())

    def note(self, *, durable: bool = True, **values: Any) -> None:
        """Add values to the report; without `durable` they may be lost: no wait for the disk."""
        with self._lock:
            self._report = replace(self._report, **values)
            found = RankReport.read(self._path)
            if found is not None and found.attempt > self._report.attempt:
                return
            if durable:
                write_record(self._path, asdict(self._report))
                return
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            with suppress(OSError):
                temporary.write_text(json.dumps(sealed(asdict(self._report))), encoding="utf-8")
                temporary.replace(self._path)

    def fail(self, error: BaseException) -> None:
        """Add the error that ended this rank."""
        names = [cls.__name__ for cls in type(error).__mro__]
        if "SupersededError" in names:  # the job that took the folder over may have this name
            return
        known = [name for name in names if name in ("NodeError", "RankError", "UserError")]
        self.note(
            end="error",
            kind=known[0] if known else names[0],
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
        )


@dataclass(kw_only=True)
class Rank(Context):
    """Context of one rank, which reports to the launcher.

    Attributes:
        attempt: how often SLURM has restarted the job under the same id.
        file: this rank's report; that of rank 0 holds the verdict.
        rendezvous: the store that the ranks share, once it has joined them.
        said: messages for the launcher's terminal.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    cpus: int
    gpus: bool
    folder: Path
    name: str
    attempt: int
    file: RankFile
    rendezvous: Rendezvous | None = None
    said: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    last_saved: int | None = None
    _pending: dict[str, Any] | None = None
    _reported: float = float("-inf")
    _first: tuple[int, float] | None = None

    def store(self, timeout: timedelta) -> "Store":
        """Return the store of the next process group; every rank calls this as often."""
        if self.rendezvous is None:  # the only rank
            return super().store(timeout)
        return self.rendezvous.store(timeout)

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and return ("requeue").

        The ranks learn of it at different moments: agree on it (all-reduce) at a step boundary.
        """
        return bool(self.reasons)

    def is_current(self) -> bool:
        """Return whether the launcher's record names this job; True if it cannot be read."""
        try:
            job = record.read_job(self.folder)
        except (OSError, LaunchError):
            return True
        return job is not None and job.name == self.name and job.state != "ended"

    def report(self, progress: dict[str, Any]) -> None:
        """Report progress; cheap, and ignored on ranks other than 0.

        Known keys: epoch, epochs, step, steps, loss, knn (in percent), images_per_second. Of the
        step it adds that of the first report (first_step), and the seconds since then.
        """
        if self.rank:
            return
        now = time.monotonic()
        if "step" in progress:
            self._first = self._first or (int(progress["step"]), now)
            progress = {**progress, "first_step": self._first[0], "seconds": now - self._first[1]}
        unknown = {key for key, n in progress.items() if isinstance(n, float) and not isfinite(n)}
        self._pending = {key: value for key, value in progress.items() if key not in unknown}
        if now - self._reported >= REPORT_SECONDS:
            self.flush()

    def say(self, message: str) -> None:
        """Print a message in the launcher's terminal; ignored on ranks other than 0."""
        if self.rank == 0:
            self.said.append(message)
            self.file.note(said=self.said)

    def saved(self, step: int) -> None:
        """Report that the state of this step is complete on disk."""
        if self.rank == 0 and step != self.last_saved:
            self.last_saved = step
            self.file.note(saved=step, durable=False)

    def flush(self) -> None:
        """Write the last progress."""
        if self._pending is not None:
            self.file.note(progress=self._pending, durable=False)
            self._pending = None
            self._reported = time.monotonic()

    def close(self) -> None:
        """Remove the file in which the ranks met, if it was one."""
        if self.rendezvous is not None and self.rank == 0:
            self.rendezvous.close()

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank at once with an error, from a thread other than a stuck main thread."""
        log.error("%s: %s", type(error).__name__, error)
        self.flush()
        with suppress(OSError):
            self.file.fail(error)
        self.close()
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Run the job on record as one of its ranks."""
    folder, name, *numbers = arguments
    if not numbers:
        run(folder, name)
        return
    rank, ranks = map(int, numbers)
    start(
        Path(folder), name, ["localhost"],
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, node=0,
    )  # fmt: skip


def run(folder: str, name: str) -> None:
    """Run the job on record as one of its ranks on SLURM."""
    import submitit

    environment = submitit.JobEnvironment()
    start(
        Path(folder),
        name,
        list(environment.hostnames),
        rank=environment.global_rank,
        local_rank=environment.local_rank,
        world_size=environment.num_tasks,
        local_world_size=environment.num_tasks // environment.num_nodes,
        node=environment.node,
    )


def start(folder: Path, name: str, hosts: list[str], **numbers: Any) -> None:
    """Run the job on record as one of its ranks.

    Only the job that `job.json` names may run: one submitted twice by a crash ends here, and one
    that was given up while nobody could cancel it.

    Args:
        folder: of the run.
        name: of the job.
        hosts: names of its nodes.
        **numbers: of this rank, as in `Rank`.
    """
    number = numbers["rank"]
    rank_log(number)
    job = record.read_job(folder)
    if job is None or job.name != name or job.state == "ended":
        why = f"over: {job.ending}" if job and job.name == name else "replaced by another one"
        log.warning("job %s was %s; nothing to do", name, why)
        return
    # An attempt before this one, under the same id, may have saved steps.
    before = record.saved_step(folder, job)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    file = RankFile(folder, name, number, attempt)
    if number == 0:
        file.note(saved=before)
    else:
        file.note()
    rank = Rank(
        **numbers,
        cpus=job.cpus,
        gpus=job.gpus,
        folder=folder,
        name=name,
        attempt=attempt,
        file=file,
    )
    _listen(rank)
    try:
        _join(rank, hosts)
        verdict = _call(job, rank)
        rank.flush()
    except BaseException as error:
        rank.flush()
        # Destroying a broken process group may hang, and with it the partners for ever.
        faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)
        with suppress(OSError):  # a full disk: the log has it too
            file.fail(error)
        rank.close()
        raise
    file.note(end=verdict, time=time.time())
    rank.close()
    gc.freeze()  # at its end the interpreter would search all modules for garbage: 1.5 s
    # A job without progress must not requeue itself for ever: the launcher counts attempts.
    # One that SLURM terminates is either being cancelled, or requeued by SLURM itself.
    progressed = number == 0 and (rank.last_saved or 0) > before and "terminate" not in rank.reasons
    if verdict == "requeue" and progressed and job.cluster == "slurm":
        requeue(os.environ["SLURM_JOB_ID"])
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)


def _join(rank: Rank, hosts: list[str]) -> None:
    """Meet the other ranks of this attempt, and let libraries know all of them.

    Rank 0 publishes the address before it imports PyTorch, so that a slow one is waited for.
    """
    if rank.world_size > 1 and rank.rank == 0:
        rank.rendezvous = open_rendezvous(rank.attempt, rank.world_size, hosts)
        rank.file.note(meeting=asdict(rank.rendezvous.address))
    elif rank.world_size > 1:
        published = record.rank_file(rank.folder, rank.name, 0)
        rank.rendezvous = find_rendezvous(published, rank.attempt, rank.world_size)
    os.environ |= {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "MASTER_ADDR": rank.rendezvous.address.host if rank.rendezvous else "127.0.0.1",
        "OMP_NUM_THREADS": str(rank.cpus),
    }
    # Blocks of GPU memory that grow leave fewer gaps.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if len(hosts) == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not the interface to the network


def _call(job: Job, context: Rank) -> str:
    module, name = job.function.split(":")
    gc.disable()  # searching what is being imported for garbage takes an eighth of torch's import
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    gc.enable()
    verdict = function(context=context, **job.arguments) or "done"
    if verdict not in VERDICTS:
        raise ValueError(f"{job.function} returned {verdict!r}, not one of {VERDICTS}")
    if verdict == "requeue" and _is_asked_to_stop(context):
        return "stopped"
    return str(verdict)


def _listen(rank: Rank) -> None:
    """Turn signals and the launcher's request into reasons to stop."""

    def note(number: int, frame: FrameType | None) -> None:
        rank.reasons.add("limit" if number == signal.SIGUSR2 else "terminate")

    signal.signal(signal.SIGUSR2, note)
    signal.signal(signal.SIGTERM, note)

    def watch() -> None:
        while not _is_asked_to_stop(rank):
            # A thousand ranks asking twice a second would be a load on a shared file system.
            time.sleep(0.5 if rank.rank == 0 else max(0.5, rank.world_size / 64))
        rank.reasons.add("stop")

    threading.Thread(target=watch, daemon=True, name="maect-stop").start()


def _is_asked_to_stop(rank: Rank) -> bool:
    try:
        job = record.read_job(rank.folder)
    except (OSError, LaunchError):  # the launcher reports it
        return False
    return job is not None and job.name == rank.name and job.stop


def requeue(job_id: str) -> None:
    """Put this SLURM job back into the queue, as its last act.

    A job that is being cancelled is left alone: a requeue would bring it back to life.
    """
    for _ in range(REQUEUE_TRIES):
        _, state, _ = command("squeue", "-h", "-j", job_id, "-o", "%T")
        if state and state != "RUNNING":
            return
        if state and command("scontrol", "requeue", job_id)[0] == 0:
            log.info("job %s: saved and put back into the queue", job_id)
            return
        time.sleep(5)  # the controller is away; without it the launcher submits it again


if __name__ == "__main__":
    # By its own name, so that there is one such module in the process.
    from maect.launch.worker import main

    main(sys.argv[1:])
