"""What a run folder says about its job: `job.json`, `progress.json`, `verdict.json`, rank files.

job.json               the one job of this folder; written before and after submission
progress.json          last report of rank 0; its step is what "progress" means
verdict.json           how the function returned: done, requeue or stopped
stop                   "save and stop", holding the name of the job that it is meant for
jobs/NAME/             submission, logs and rank files of one job
"""

import json
import socket
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maect.core.files import read_json, write_json

LOG_TAIL = 15  # lines of a log that an error message quotes


@dataclass
class Job:
    """The content of `job.json`.

    Attributes:
        name: unique; it is the SLURM job name and, here, in the environment of each process.
        attempt: number of this job since the run was begun or last completed.
        state: "submitting" until the cluster has given an id, then "submitted", then "ended".
        id: SLURM job id, or the process id of the local controller.
        created: creation time of the local controller, beside its reusable process id.
        submitted: Unix time of submission.
        step: step reached at submission.
        earlier: the jobs before this one: name, id, step and how each ended.
    """

    cluster: str
    name: str
    ranks: int
    step: int
    attempt: int = 1
    state: str = "submitting"
    id: str | None = None
    created: float | None = None
    host: str = field(default_factory=socket.gethostname)
    submitted: float = field(default_factory=time.time)
    ending: str | None = None
    earlier: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """Why a job failed, as far as its ranks could say."""

    rank: int
    kind: str
    message: str
    text: str
    log: Path


def new_job(folder: Path, cluster: str, ranks: int, previous: Job | None) -> Job:
    """A job that is about to be submitted, with the history of those before it."""
    earlier, attempt = [], 1
    if previous is None or previous.ending == "done":
        # The reports of a run that was completed and is made anew say nothing about this one.
        for name in ("progress.json", "verdict.json"):
            (folder / name).unlink(missing_ok=True)
    else:
        attempt = previous.attempt + 1
    if previous is not None:
        last = {key: getattr(previous, key) for key in ("name", "id", "step", "ending")}
        earlier = [*previous.earlier, last]
    # SLURM shows job names to everyone: the folder's own name is enough to recognise it.
    name = f"maect-{folder.name}-{uuid.uuid4().hex[:10]}"
    return Job(cluster, name, ranks, step(folder), attempt, earlier=earlier)


def read_job(folder: Path) -> Job | None:
    """The job of this folder, or None if there was none."""
    # Not `_read`: a job that cannot be read must not be taken for one that never was.
    if not (folder / "job.json").exists():
        return None
    job = Job(**read_json(folder / "job.json"))
    learn_id(folder, job)
    return job


def learn_id(folder: Path, job: Job) -> None:
    """Complete a job whose launcher died in between, although its submission went through."""
    if job.id is not None:
        return
    answer = _read(place(folder, job) / "submitted.json") or {}
    if "id" not in answer:
        # The job knows its own id, once it runs.
        answer = _read(place(folder, job) / "rank-0.json") or {}
    if "id" in answer:
        job.id, job.created = answer["id"], answer.get("created")
        job.state, job.submitted = "submitted", time.time()


def write_job(folder: Path, job: Job) -> None:
    """Write `job.json`, atomically."""
    write_json(folder / "job.json", asdict(job))


def place(folder: Path, job: Job) -> Path:
    """The folder with a job's submission, logs and rank files."""
    return folder / "jobs" / job.name


def log(folder: Path, job: Job, rank: int) -> Path:
    """The log of one rank (submitit's naming)."""
    return place(folder, job) / f"{job.id}_{rank}_log.out"


def progress(folder: Path) -> dict[str, Any]:
    """The last report of rank 0, or {}."""
    return _read(folder / "progress.json") or {}


def step(folder: Path) -> int:
    """The step of the last report, or 0."""
    return int(progress(folder).get("step") or 0)


def verdict(folder: Path, job: Job) -> str | None:
    """How this job's function returned ("done", "requeue", "stopped"), or None."""
    value = _read(folder / "verdict.json") or {}
    return value.get("verdict") if value.get("name") == job.name else None


def ask_to_stop(folder: Path, job: Job) -> None:
    """Ask the job to save and stop."""
    write_json(folder / "stop", job.name)


def is_asked_to_stop(folder: Path, name: str) -> bool:
    """Whether the job of this name was asked to save and stop."""
    return bool(_read(folder / "stop") == name)


def take_back_stop(folder: Path) -> None:
    """Forget a request to stop."""
    (folder / "stop").unlink(missing_ok=True)


def ranks(folder: Path, job: Job) -> dict[int, dict[str, Any]]:
    """What each rank that has started says: pid, host, time, end, error."""
    found = {}
    for path in place(folder, job).glob("rank-*.json"):
        value = _read(path)
        if value:
            found[int(value["rank"])] = value
    return found


def failure(folder: Path, job: Job, suspect: int | None = None) -> Failure:
    """The error that a job ended with: the first rank's that raised, else the suspect's last lines.

    A wrong input outranks the others, which may have failed only because a partner left.
    """
    errors = [rank for rank in ranks(folder, job).values() if rank.get("end") == "error"]
    if errors:
        first = min(errors, key=lambda rank: (rank["kind"] != "UserError", rank["time"]))
        rank = int(first["rank"])
        text = "\n".join(first["traceback"].strip().splitlines()[-LOG_TAIL:])
        return Failure(rank, first["kind"], first["message"], text, log(folder, job, rank))
    rank = suspect or 0
    return Failure(rank, "", "", tail(log(folder, job, rank)), log(folder, job, rank))


def tail(path: Path, lines: int = LOG_TAIL) -> str:
    """The last lines of a text file, or a word on why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.rstrip().splitlines()[-lines:]) or "(the log is empty)"


def _read(path: Path) -> Any:
    # Reports are replaced under us and may vanish with a cleared folder: absent is an answer.
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
