"""Read and write `job.json`, the record of a folder's job, and the files that its ranks write.

Each file has one writer:

    job.json               the launcher: what is asked for, this job, ids of those before it, the
                           request to stop
    owner.lock             the launcher, which locks it: the holder may write job.json
    jobs/NAME/rank-N.json  rank N: how it ended; rank 0 also its last report, the last step saved,
                           the verdict, where the ranks meet
    jobs/NAME/job.sh       the launcher: the script for sbatch
    jobs/NAME/*.out        the ranks' logs

Only its owner can enter `jobs`: SLURM runs the script there, and rank 0 writes the secret by which
ranks of several nodes know each other.
"""

import json
import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from maect.core.errors import UserError
from maect.core.files import (
    make_folder,
    read_text,
    seek_record,
    verified,
    with_retries,
    write_record,
)
from maect.core.resources import Resources

LOG_TAIL = 15  # lines of a log that an error message quotes
VERDICTS = ("done", "requeue", "stopped")  # how the launched function may return
STATES = ("submitting", "submitted", "ended")
LONGEST_NAME = 200  # bytes of a folder's name in a job's: a file may be called so, too


class LaunchError(UserError):
    """A job that cannot be started or that ended for good without its result."""


@dataclass(frozen=True)
class Task:
    """Function that every rank calls, by name, so that a start imports nothing heavy.

    Attributes:
        function: `package.module:function`; called as `function(context=..., **arguments)`.
        arguments: keyword arguments; they travel as JSON.
        identity: of the result that they ask for: a live job of another one is not waited for.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    identity: str = ""


@dataclass
class Job:
    """Content of `job.json`.

    Attributes:
        name: unique; it is the SLURM job name and in the environment of each local process.
        step: last step that was saved before its submission.
        function, arguments, identity: of its task.
        cpus: CPUs of each rank.
        gpus: whether it asks for GPUs.
        place: full path of the folder.
        site: name of the machine or SLURM cluster that has it; None if SLURM did not say, and then
            it was not submitted.
        state: "submitting" until the cluster has given an id, then "submitted", then "ended".
        id: SLURM job id, or the process id of rank 0.
        pids: process ids of all ranks of a local job.
        stop: the ranks are asked to save and stop.
        ending: why it is over.
        earlier: ids of the jobs before this one.
    """

    cluster: str
    name: str
    ranks: int
    step: int = 0
    function: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    identity: str = ""
    cpus: int = 1
    gpus: bool = False
    place: str = ""
    site: str | None = None
    state: str = "submitting"
    id: str | None = None
    pids: list[int] = field(default_factory=list)
    stop: bool = False
    ending: str | None = None
    earlier: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.cluster} job {self.id or self.name}"

    def computes(self, identity: str) -> bool:
        """Return whether its result has this identity; true if either is unknown."""
        return self.identity in ("", identity)


@dataclass
class RankReport:
    """Content of `rank-N.json`.

    Attributes:
        attempt: how often SLURM had restarted the job under the same id.
        time: when it began or, once it is over, ended.
        end: how its function returned, or "error".
        kind: of the error: "UserError", "NodeError", "RankError" (another rank failed) or its own
            name.
        message, traceback: of the error.
        progress, said, saved: of rank 0: its last report, its messages for people, the last step
            that is saved.
        meeting: of rank 0: where the ranks of this attempt meet (`rendezvous.Address`).
    """

    rank: int
    attempt: int = 0
    time: float = 0.0
    end: str | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    saved: int | None = None
    meeting: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a rank's file; None if it is missing or damaged."""
        value = seek_record(path)
        # Of an earlier revision a report may have no value for a key.
        known = {
            one.name: value[one.name] for one in fields(cls) if value.get(one.name) is not None
        }
        return cls(**known) if "rank" in known else None


def new_job(folder: Path, task: Task, resources: Resources, previous: Job | None) -> Job:
    """Return a job that is about to be submitted, with the ids of those before it."""
    job = Job(
        cluster=resources.cluster,
        name=unique_name(folder),
        ranks=resources.ranks,
        function=task.function,
        arguments=task.arguments,
        identity=task.identity,
        cpus=int(resources.cpus_per_task),
        gpus=resources.has_gpus,
        place=str(folder),
    )
    if previous is None:
        return job
    job.earlier = [*previous.earlier]
    if previous.id is not None:
        job.earlier.append(previous.id)
    # A run that was complete, or had other settings, has saved no step of this one.
    is_other = not previous.computes(task.identity)
    if not is_other and "done" not in (previous.ending, verdict(folder, previous)):
        job.step = saved_step(folder, previous)
    return job


def unique_name(folder: Path) -> str:
    """Return a new job's name: that of its folder, cut if it is long, and ten random digits.

    SLURM shows job names to everybody, so the folder's path is not in it.
    """
    short = folder.name.encode("utf-8", "replace")[:LONGEST_NAME].decode("utf-8", "ignore")
    return f"maect-{short}-{uuid.uuid4().hex[:10]}"


def read_job(folder: Path) -> Job | None:
    """Read the job of this folder; None if there was none.

    A record that was copied or moved with its folder names another place: the job there is left
    alone, and has ended here.

    Raises:
        LaunchError: the record is damaged; it is never taken for one that is missing.
    """
    path = folder / "job.json"
    try:
        value = verified(json.loads(with_retries(read_text, path)))
        value = value.get("request", {}) | value  # of version 0.2.0
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
    if job.state != "ended" and not _is_place(folder, job.place):
        job.state = "ended"
        job.ending = of_another_place(job)
    return job


def of_another_place(job: Job) -> str:
    """Return the ending, here, of a job that works in another folder."""
    return f"it is the job of {job.place}"


def _is_place(folder: Path, place: str) -> bool:
    """Return whether a job's folder is this one, which may be mounted under two names."""
    if place in ("", str(folder)):
        return True
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return with_retries(os.path.samefile, folder, place)
    return False


def write_job(folder: Path, job: Job) -> None:
    """Write `job.json` atomically; only the launcher that holds the folder's lock may."""
    with_retries(write_record, folder / "job.json", asdict(job))


def job_folder(folder: Path, name: str) -> Path:
    """Return the folder with a job's submission, logs and rank files."""
    return folder / "jobs" / name


def make_job_folder(folder: Path, name: str) -> Path:
    """Make a job's folder, where only this user can look; others may begin jobs beside it."""
    path = job_folder(folder, name)
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def is_ours(folder: Path, job: Job) -> bool:
    """Return whether this user can see into a job's folder; true if there is none."""
    own = job_folder(folder, job.name)
    return not own.exists() or os.access(own, os.R_OK, effective_ids=True)


def remove_job_folder(folder: Path, name: str) -> None:
    """Remove the folder of a job that SLURM refused."""
    shutil.rmtree(job_folder(folder, name))


def log(folder: Path, job: Job, rank: int) -> Path:
    """Return the log of one rank; on SLURM submitit's script names it."""
    number = "local" if job.cluster == "local" else job.id
    return job_folder(folder, job.name) / f"{number}_{rank}_log.out"


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """Return the path of a rank's status file."""
    return job_folder(folder, name) / f"rank-{rank}.json"


def ranks(folder: Path, job: Job) -> dict[int, RankReport]:
    """Read the reports of all ranks that have started; none if only their owner can look."""
    files: list[Path] = []
    with suppress(PermissionError):
        files = list(job_folder(folder, job.name).glob("rank-*.json"))
    found = map(RankReport.read, files)
    return {report.rank: report for report in found if report}


def rank_0(folder: Path, job: Job) -> RankReport:
    """Read rank 0's report; an empty one as long as it has not started."""
    return RankReport.read(rank_file(folder, job.name, 0)) or RankReport(0)


def progress(folder: Path, job: Job | None) -> dict[str, Any]:
    """Return rank 0's last report on its progress, or {}."""
    return {} if job is None else rank_0(folder, job).progress


def saved_step(folder: Path, job: Job) -> int:
    """Return the last step that this job or one before it has saved, or 0."""
    saved = rank_0(folder, job).saved
    return job.step if saved is None else saved


def verdict(folder: Path, job: Job) -> str | None:
    """Return how this job's function returned ("done", "requeue", "stopped"), or None."""
    end = rank_0(folder, job).end
    return end if end in VERDICTS else None


def first_error(folder: Path, job: Job) -> RankReport | None:
    """Return the report of the rank that raised first, a wrong input before others; None: none."""
    errors = [report for report in ranks(folder, job).values() if report.end == "error"]
    return min(errors, key=lambda error: (error.kind != "UserError", error.time), default=None)


def tail(path: Path) -> str:
    """Return the last lines of a text file, or why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL:]) or "(the log is empty)"
