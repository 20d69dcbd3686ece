"""Read and write `job.json`, the record of a folder's job, and the files that its ranks write.

Each file has one writer:

    job.json               the launcher: what is asked for, this job and those before it, the
                           request to stop, progress and verdict at its end
    owner.lock             the launcher, which locks it: the holder may write job.json
    jobs/NAME/rank-N.json  rank N: where it runs and how it ended; rank 0 also its last report,
                           the last step saved, the verdict, where the ranks meet
    jobs/NAME/*.pkl, *.sh  submitit: what the ranks unpickle, and the script for sbatch
    jobs/NAME/*.out        the ranks' logs

Only its owner can enter `jobs`: it has the secret by which the ranks of several nodes know each
other.
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
"""Messages of gloo and NCCL on a rank that has lost another one."""
SEVERITY = {"UserError": 0, "NodeError": 1, "RankError": 3}
"""Kinds of error, those that explain others first; any other kind is 2."""
LONGEST_NAME = 200  # bytes of a folder's name in a job's: a file may be called so, too


def boot() -> str:
    """Return the id of this machine's last boot; "" if the kernel does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


class Request(TypedDict, total=False):
    """Function of a job, and how it is submitted.

    Attributes:
        visible: `CUDA_VISIBLE_DEVICES` of the launcher.
        parameters: of submitit.
    """

    function: str
    arguments: dict[str, Any]
    identity: str
    cpus: int
    visible: str | None
    gpus: bool
    parameters: dict[str, Any]
    python: str | None


class EarlierJob(TypedDict):
    """Job before the present one."""

    name: str
    id: str | None
    step: int
    ending: str | None
    verdict: str | None


@dataclass
class Job:
    """Content of `job.json`.

    Attributes:
        name: unique; it is the SLURM job name and, here, in the environment of each process.
        step: last step that was saved before its submission.
        request: its function, and how it is submitted.
        attempt: number of this job since the run was begun or last completed, counting those that
            the cluster took.
        state: "submitting" until the cluster has given an id, then "submitted", then "ended".
        id: SLURM job id, or the process id of the local controller.
        host: name of the machine that submitted it.
        boot: id of that machine's boot.
        site: name of the SLURM cluster: ids of others mean nothing.
        place: real path of the folder.
        submitted: Unix time of submission.
        stop: the ranks are asked to save and stop.
        ending: why it is over.
        verdict: how its function returned, if it did: "done", "requeue" or "stopped".
        progress: rank 0's last report, once it is over.
        saved: last step that was saved, once it is over.
        held: seconds x ranks for which the jobs before it held their devices; once it is over,
            including its own.
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
    site: str | None = None
    place: str = ""
    submitted: float = field(default_factory=lambda: time.time())
    stop: bool = False
    ending: str | None = None
    verdict: str | None = None
    progress: Report = field(default_factory=Report)
    saved: int | None = None
    held: float = 0.0
    earlier: list[EarlierJob] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.cluster} job {self.id or self.name}"

    def computes(self, identity: str) -> bool:
        """Return whether its result has this identity; true if either is unknown."""
        return self.request.get("identity", "") in ("", identity)

    def set_id(self, id: str) -> None:
        """Set the id that the cluster has given."""
        self.id = id
        self.state = "submitted"
        self.submitted = time.time()


@dataclass
class RankReport:
    """Content of `rank-N.json`.

    Attributes:
        id: of its job.
        time: when it began or, once it is over, ended.
        end: how its function returned, or "error".
        kind, message, traceback: of the error, as in `Failure`.
        held: seconds x ranks for which this run's jobs have held their devices so far.
        progress, said, saved, saving: of rank 0: its last report, its messages for people, the
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
        """Read a rank's file; None if it is missing or damaged."""
        value = seek_record(path)
        # A job of another revision may have more keys.
        known = {one.name: value[one.name] for one in fields(cls) if one.name in value}
        return cls(**known) if "rank" in known else None


@dataclass(frozen=True)
class Failure:
    """Cause of a job's failure, as far as its ranks could say.

    Attributes:
        rank: the rank that reported it.
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
    """Return a job that is about to be submitted, with the history of those before it."""
    job = Job(cluster, unique_name(folder), ranks, step=0)
    if previous is None:
        return job
    job.earlier = [*previous.earlier]
    if previous.id is not None:
        past = {key: getattr(previous, key) for key in EarlierJob.__annotations__}
        job.earlier.append(cast(EarlierJob, past))
    # Reports of a run that was complete, or had other settings, say nothing of this one.
    if "done" in (previous.ending, previous.verdict) or not previous.computes(identity):
        return job
    job.attempt = previous.attempt if previous.id is None else previous.attempt + 1
    job.step = saved_step(folder, previous)
    job.held = held_seconds(folder, previous)
    return job


def unique_name(folder: Path) -> str:
    """Return a new job's name: that of its folder, cut if it is long, and ten random digits.

    SLURM shows job names to everybody, so the folder's path is not in it.
    """
    short = folder.name.encode("utf-8", "replace")[:LONGEST_NAME].decode("utf-8", "ignore")
    return f"maect-{short}-{uuid.uuid4().hex[:10]}"


def is_of(folder: Path, job: Job) -> bool:
    """Return whether a job that may be alive is this folder's.

    A record that was copied or moved with its folder names another place: a job there is left
    alone, and this folder gets one of its own.
    """
    if not job.place or job.place == os.path.realpath(folder):
        return True
    with suppress(OSError):
        return os.path.samefile(folder, job.place)  # it may be mounted under two names
    return False


def read_job(folder: Path) -> Job | None:
    """Read the job of this folder; None if there was none.

    Raises:
        LaunchError: the record is damaged; it is never taken for one that is missing.
    """
    path = folder / "job.json"
    try:
        value = verified(parsed(with_retries(read_text, path)))
        # A launcher of another revision may have more keys.
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
    """Write `job.json` atomically; only the launcher that holds the folder's lock may."""
    with_retries(write_record, folder / "job.json", asdict(job))


def learn_id(folder: Path, job: Job) -> None:
    """Take a job's id from its rank 0, if its launcher died before it could note it."""
    if job.id is not None or job.state == "ended":
        return
    known = rank_0(folder, job).id
    if known:
        job.set_id(known)


def job_folder(folder: Path, name: str) -> Path:
    """Return the folder with a job's submission, logs and rank files."""
    return folder / "jobs" / name


def make_job_folder(folder: Path, name: str) -> Path:
    """Make a job's folder, in `jobs`, where only this user can look."""
    make_folder(folder)
    path = job_folder(folder, name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def remove_job_folder(folder: Path, name: str) -> None:
    """Remove the folder of a job that SLURM refused."""
    shutil.rmtree(job_folder(folder, name))


def log(folder: Path, job: Job, rank: int) -> Path:
    """Return the log of one rank (submitit's naming)."""
    return job_folder(folder, job.name) / f"{job.id}_{rank}_log.out"


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """Return the path of a rank's status file."""
    return job_folder(folder, name) / f"rank-{rank}.json"


@contextmanager
def lock_while_alive(folder: Path, job: Job) -> Iterator[None]:
    """Hold a shared lock on the job's folder: by it launchers in other containers see the rank.

    Only for local jobs: SLURM knows which of its own are alive.
    """
    if job.cluster != "local":
        yield
        return
    descriptor = os.open(job_folder(folder, job.name), os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def has_live_rank(folder: Path, job: Job) -> bool:
    """Return whether a rank on this machine holds the lock, in whichever container."""
    try:
        descriptor = os.open(job_folder(folder, job.name), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def ranks(folder: Path, job: Job) -> dict[int, RankReport]:
    """Read the reports of all ranks that have started; none if only their owner can look."""
    files: list[Path] = []
    with suppress(PermissionError):
        files = list(job_folder(folder, job.name).glob("rank-*.json"))
    found = map(RankReport.read, files)
    return {report.rank: report for report in found if report}


def is_hidden(folder: Path) -> bool:
    """Return whether only another user can read the reports of this folder's jobs."""
    try:
        os.listdir(folder / "jobs")
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def rank_0(folder: Path, job: Job) -> RankReport:
    """Read rank 0's report; an empty one as long as it has not started."""
    return RankReport.read(rank_file(folder, job.name, 0)) or RankReport(0)


def progress(folder: Path, job: Job | None) -> Report:
    """Return rank 0's last report on its progress, or {}."""
    if job is None:
        return {}
    report = rank_0(folder, job).progress
    return job.progress if report is None else report


def saved_step(folder: Path, job: Job) -> int:
    """Return the last step that this job or one before it has saved, or 0."""
    known = (rank_0(folder, job).saved, job.saved, job.step)
    return next(step for step in known if step is not None)


def is_saving(folder: Path, job: Job) -> bool:
    """Return whether rank 0 reports that a state is being written."""
    return rank_0(folder, job).saving


def held_seconds(folder: Path, job: Job) -> float:
    """Return the seconds x ranks for which this job and those before it held their devices.

    A job counts from the start of its processes to rank 0's last sign of life.
    """
    held = rank_0(folder, job).held
    return job.held if held is None else held


def verdict(folder: Path, job: Job) -> str | None:
    """Return how this job's function returned ("done", "requeue", "stopped"), or None."""
    report = RankReport.read(rank_file(folder, job.name, 0))
    end = report.end if report else job.verdict
    return end if end in VERDICTS else None


def failure(folder: Path, job: Job, suspect: int | None = None) -> Failure:
    """Return the error that a job ended with, or else the last lines of the suspect rank's log.

    Of several errors a wrong input counts first, for others may follow from it, and a rank's own
    fault before a lost connection: clocks of nodes may be seconds apart.
    """
    errors = [report for report in ranks(folder, job).values() if report.end == "error"]
    if errors:
        first = min(errors, key=_severity)
        text = "\n".join(first.traceback.strip().splitlines()[-LOG_TAIL:])
        return Failure(first.rank, first.kind, first.message, text, log(folder, job, first.rank))
    rank = suspect or 0
    return Failure(rank, "", "", tail(log(folder, job, rank)), log(folder, job, rank))


def _severity(error: RankReport) -> tuple[int, bool, float]:
    lost = LOST_PEER.search(error.message) is not None
    return SEVERITY.get(error.kind, 2), lost, error.time


def tail(path: Path) -> str:
    """Return the last lines of a text file, or why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL:]) or "(the log is empty)"
