"""The one record of a folder's job, `job.json`, and what its ranks say about themselves.

A file has one writer; what would have two, on machines without a lock in common, is two files:

    job.json               the launcher: what is asked for, this job and those before it, the
                           request to stop, progress and verdict at its end
    owner.lock             the launcher; the kernel's lock on it says who may write job.json
    jobs/NAME/rank-N.json  rank N: since when, where it runs, how it ended; rank 0 also its last
                           report, the last step saved, the verdict, where the ranks meet
    jobs/NAME/alive        ranks of a local job hold a lock on it for as long as they live
    jobs/NAME/*.pkl, *.sh  submitit: what the ranks unpickle, and what sbatch is given
    jobs/NAME/*.out        their logs

`jobs` is its owner's alone: it has the secret by which the ranks of several nodes know each other.
"""

import fcntl
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypedDict, cast

from maect.core.files import (
    make_folder,
    parsed,
    read_text,
    seek_record,
    verified,
    with_retries,
    write_record,
)
from maect.launch.progress import Report
from maect.launch.resources import LaunchError

LOG_TAIL = 15  # lines of a log that an error message quotes
VERDICTS = ("done", "requeue", "stopped")  # how the launched function may return
STATES = ("submitting", "submitted", "ended")
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|ncclRemoteError|"
    r"connection was likely closed|timed out waiting|wait timeout|socket timeout", re.IGNORECASE,
)  # fmt: skip
"""What gloo and NCCL say on a rank whose other one has ended."""
LONGEST_NAME = 200  # bytes of a folder's name in a job's: a file may be called so, too


def boot() -> str:
    """Return what tells the kernel that runs here from any other; "" if it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def namespace() -> str:
    """Return what tells the process ids that are seen here from those in other containers."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


class Request(TypedDict, total=False):
    """Function of a job, and what the ranks and the process that submits them have to know."""

    function: str
    arguments: dict[str, Any]
    identity: str
    cpus: int
    visible: str | None
    """`CUDA_VISIBLE_DEVICES` of the launcher."""
    gpus: bool
    parameters: dict[str, Any]
    """Of submitit."""
    python: str | None


class Past(TypedDict):
    """Job before the present one."""

    name: str
    id: str | None
    step: int
    ending: str | None
    verdict: str | None


@dataclass
class Job:
    """The content of `job.json`.

    Attributes:
        name: unique; it is the SLURM job name and, here, in the environment of each process.
        step: last step that was saved before its submission.
        request: what it computes, and how it is submitted.
        attempt: number of this job since the run was begun or last completed, of those that the
            cluster took.
        state: "submitting" until the cluster has given an id, then "submitted", then "ended".
        id: SLURM job id, or the process id of the local controller.
        host: name of the machine that submitted it.
        boot: its kernel: two machines may have one name.
        namespace: its process ids: two containers may have one kernel.
        site: what the cluster calls itself: ids of others mean nothing.
        place: real path of the folder.
        submitted: Unix time of submission.
        stop: the ranks are asked to save and stop.
        ending: why it is over.
        verdict: how its function returned, if it did: "done", "requeue" or "stopped".
        progress: rank 0's last report, once it is over.
        saved: last step that was saved, once it is over.
        held: seconds x ranks for which the jobs before it held their devices; once it is over, it,
            too.
        earlier: the jobs before this one that the cluster took.
    """

    cluster: str
    name: str
    ranks: int
    step: int
    request: Request = field(default_factory=Request)
    attempt: int = 1
    state: str = "submitting"
    id: str | None = None
    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot)
    namespace: str = field(default_factory=namespace)
    site: str | None = None
    place: str = ""
    submitted: float = field(default_factory=lambda: time.time())
    stop: bool = False
    ending: str | None = None
    verdict: str | None = None
    progress: Report = field(default_factory=Report)
    saved: int | None = None
    held: float = 0.0
    earlier: list[Past] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.cluster} job {self.id or self.name}"

    def computes(self, identity: str) -> bool:
        """Return whether its result is the one of this identity, as far as that is known."""
        return self.request.get("identity", "") in ("", identity)

    def accepted(self, id: str) -> None:
        """Note the id that the cluster has given."""
        self.id, self.state, self.submitted = id, "submitted", time.time()


@dataclass
class RankReport:
    """The content of `rank-N.json`.

    Attributes:
        id: of its job.
        time: when it began or, once it is over, ended.
        end: how its function returned, or "error".
        kind, message, traceback: of the error, as in `Failure`.
        held: seconds x ranks for which this run's jobs have held their devices so far.
        progress, said, saved, saving: of rank 0: its last report, its sentences for people, the
            last step that is saved, whether a state is being written.
        meeting: of rank 0: where the ranks of this attempt meet (`rendezvous.Address`).
    """

    rank: int
    id: str | None = None
    pid: int = 0
    time: float = 0.0
    end: str | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    held: float | None = None
    progress: Report | None = None
    said: list[str] = field(default_factory=list)
    saved: int | None = None
    saving: bool = False
    meeting: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a rank's file; None: it is not there, or damaged."""
        value = seek_record(path)
        # A job of another revision may say more.
        known = {one.name: value[one.name] for one in fields(cls) if one.name in value}
        return cls(**known) if "rank" in known else None


@dataclass(frozen=True)
class Failure:
    """Cause of a job's failure, as far as its ranks could say.

    Attributes:
        rank: which one said so.
        kind: of the error: "UserError", "NodeError", "RankError" (another rank failed) or its own
            name; "": none was raised.
        message: of the error.
        text: the end of its traceback, or of the rank's log.
        log: of the rank.
    """

    rank: int
    kind: str
    message: str
    text: str
    log: Path


def new_job(
    folder: Path, cluster: str, ranks: int, previous: Job | None, identity: str = ""
) -> Job:
    """A job that is about to be submitted, with the history of those before it."""
    earlier, attempt, step, held = [], 1, 0, 0.0
    # What was reported of a run that was complete, or had other settings, says nothing of this one.
    over = previous is None or "done" in (previous.ending, previous.verdict)
    if previous is not None and not over and previous.computes(identity):
        attempt = previous.attempt + (previous.id is not None)
        step = saved_step(folder, previous)
        held = held_seconds(folder, previous)
    if previous is not None:
        last = cast(Past, {key: getattr(previous, key) for key in Past.__annotations__})
        earlier = [*previous.earlier, *([last] if previous.id is not None else [])]
    name = unique_name(folder)
    return Job(cluster, name, ranks, step, attempt=attempt, held=held, earlier=earlier)


def unique_name(folder: Path) -> str:
    """Return a new job's name: that of its folder, cut if it is long, and ten random digits.

    SLURM shows job names to everybody, so the folder's path is not in it.
    """
    short = folder.name.encode("utf-8", "replace")[:LONGEST_NAME].decode("utf-8", "ignore")
    return f"maect-{short}-{uuid.uuid4().hex[:10]}"


def is_of(folder: Path, job: Job) -> bool:
    """Return whether a job that may be alive is this folder's.

    A record that was copied or moved with its folder names another place: a job there is no job of
    this folder, which gets one of its own. The other one is left alone.
    """
    if not job.place or job.place == os.path.realpath(folder):
        return True
    with suppress(OSError):
        return os.path.samefile(folder, job.place)  # it may be mounted under two names
    return False


def read_job(folder: Path) -> Job | None:
    """The job of this folder, or None if there was none.

    Raises:
        LaunchError: the record is damaged; it is never taken for one that is not there.
    """
    path = folder / "job.json"
    try:
        value = verified(parsed(with_retries(read_text, path)))
        # Of another revision it may say more.
        job = Job(**{one.name: value[one.name] for one in fields(Job) if one.name in value})
        if not (isinstance(job.name, str) and job.state in STATES and isinstance(job.step, int)):
            raise ValueError("it has no name, state or step")
        if not isinstance(job.earlier, list):
            raise ValueError("it has no list of earlier jobs")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"{path}: damaged ({error}); if no job of this folder runs any more "
            "(squeue --me, ps), delete the file and start again: saved states stay"
        ) from None
    learn_id(folder, job)
    return job


def write_job(folder: Path, job: Job) -> None:
    """Write `job.json`, atomically; for the launcher that owns the folder."""
    with_retries(write_record, folder / "job.json", asdict(job))


def learn_id(folder: Path, job: Job) -> None:
    """Complete a job whose launcher died in between, although its submission went through."""
    if job.id is not None or job.state == "ended":
        return
    if known := rank_0(folder, job).id:  # the job knows its own id, once it runs
        job.accepted(known)


def job_folder(folder: Path, name: str) -> Path:
    """The folder with a job's submission, logs and rank files."""
    return folder / "jobs" / name


def make_job_folder(folder: Path, name: str) -> Path:
    """Make a job's folder, in `jobs`, where only this user can look."""
    make_folder(folder)
    path = job_folder(folder, name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def remove_job_folder(folder: Path, name: str) -> None:
    """Remove what was written for a job that does not exist."""
    shutil.rmtree(job_folder(folder, name))


def log(folder: Path, job: Job, rank: int) -> Path:
    """The log of one rank (submitit's naming)."""
    return job_folder(folder, job.name) / f"{job.id}_{rank}_log.out"


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """The file in which a rank says what there is to know about it."""
    return job_folder(folder, name) / f"rank-{rank}.json"


@contextmanager
def alive(folder: Path, job: Job) -> Iterator[None]:
    """Hold a lock that says that a rank lives, in whichever container: the kernel frees it.

    Only of a local job: SLURM says it of its own.
    """
    if job.cluster != "local":
        yield
        return
    with (job_folder(folder, job.name) / "alive").open("a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def lives(folder: Path, job: Job) -> bool | None:
    """Return whether a rank lives on this machine, in whichever container; None if unknown."""
    try:
        with (job_folder(folder, job.name) / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        return None
    return False


def ranks(folder: Path, job: Job) -> dict[int, RankReport]:
    """Return what each rank that has started says; nothing where only their owner can look."""
    files: list[Path] = []
    with suppress(PermissionError):
        files = list(job_folder(folder, job.name).glob("rank-*.json"))
    found = map(RankReport.read, files)
    return {report.rank: report for report in found if report}


def is_hidden(folder: Path) -> bool:
    """Return whether only another user can read what the ranks of this folder's jobs say."""
    try:
        os.listdir(folder / "jobs")
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def rank_0(folder: Path, job: Job) -> RankReport:
    """Return what rank 0 says; as long as it has not started, nothing."""
    return RankReport.read(rank_file(folder, job.name, 0)) or RankReport(0)


def progress(folder: Path, job: Job | None) -> Report:
    """Rank 0's last report, or {}."""
    if job is None:
        return {}
    report = rank_0(folder, job).progress
    return job.progress if report is None else report


def saved_step(folder: Path, job: Job) -> int:
    """The last step of which this job or one before it has saved the state, or 0."""
    known = (rank_0(folder, job).saved, job.saved, job.step)
    return next(step for step in known if step is not None)


def is_saving(folder: Path, job: Job) -> bool:
    """Return whether rank 0 says that a state is being written."""
    return rank_0(folder, job).saving


def held_seconds(folder: Path, job: Job) -> float:
    """Seconds x ranks for which this job and those before it have held their devices.

    From the start of its processes to rank 0's last sign of life.
    """
    held = rank_0(folder, job).held
    return job.held if held is None else held


def verdict(folder: Path, job: Job) -> str | None:
    """Return how this job's function returned ("done", "requeue", "stopped"), or None."""
    report = RankReport.read(rank_file(folder, job.name, 0))
    end = report.end if report else job.verdict
    return end if end in VERDICTS else None


def failure(folder: Path, job: Job, suspect: int | None = None) -> Failure:
    """The error that a job ended with: the first rank's that raised, else the suspect's last lines.

    A wrong input outranks the others, which may follow from it, and a rank's own fault what others
    say of it or of a connection to it: clocks of nodes may be seconds apart.
    """
    errors = [report for report in ranks(folder, job).values() if report.end == "error"]
    if errors:
        kinds = {"UserError": 0, "NodeError": 1, "RankError": 3}

        def order(error: RankReport) -> tuple[int, bool, float]:
            lost = LOST_PEER.search(error.message) is not None
            return kinds.get(error.kind, 2), lost, error.time

        first = min(errors, key=order)
        text = "\n".join(first.traceback.strip().splitlines()[-LOG_TAIL:])
        return Failure(first.rank, first.kind, first.message, text, log(folder, job, first.rank))
    rank = suspect or 0
    return Failure(rank, "", "", tail(log(folder, job, rank)), log(folder, job, rank))


def tail(path: Path) -> str:
    """The last lines of a text file, or a word on why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL:]) or "(the log is empty)"
