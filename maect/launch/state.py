"""The one function that says what state a folder's job is in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maect.launch import record
from maect.launch.cluster import Cluster, Look
from maect.launch.local import Local
from maect.launch.record import Job
from maect.launch.slurm import Slurm

STOPPED = "stopped by the user"


@dataclass(frozen=True)
class State:
    """What state a job is in.

    Attributes:
        look: what the cluster says; after the end on record, that.
        outcome: of an ended job: its function returned ("done"; "saved": told to save and return
            before its end), a person ended it ("stopped"), one of its ranks raised or it was never
            accepted ("failed"), it went without a word ("lost").
        failure: what a rank of an ended job said, or the last lines of its log.
    """

    look: Look
    outcome: Literal["", "done", "saved", "stopped", "failed", "lost"] = ""
    failure: record.Failure | None = None


def clusters() -> dict[str, Cluster]:
    """The clusters by name, with nothing seen yet."""
    return {"local": Local(), "slurm": Slurm()}


def state_of(folder: Path, job: Job, clusters: Mapping[str, Cluster]) -> State:
    """What state this job of `folder` is in.

    The ranks' own word counts first, then that of the cluster: the function returned, or it raised,
    whatever became of the processes. A question that the cluster does not answer is no end.

    Raises:
        LaunchError: the job runs on another machine, where nobody here can look.
    """
    if job.state == "ended":
        return meaning(folder, job, Look("ended", job.ending or "", final=job.ending == STOPPED))
    return meaning(folder, job, clusters[job.cluster].look(folder, job))


def meaning(folder: Path, job: Job, look: Look) -> State:
    """What a look at a job means, with what its ranks say by now."""
    if look.phase != "ended":
        return State(look)
    failure = record.failure(folder, job, look.rank)
    verdict = record.verdict(folder, job)
    if verdict == "done" or job.ending == "done":
        return State(look, "done", failure)
    if look.final:
        return State(look, "stopped", failure)
    if failure.kind or (job.state == "ended" and job.id is None):
        return State(look, "failed", failure)
    return State(look, "saved" if verdict else "lost", failure)
