"""State of a job: what a cluster says about it, and the one function that decides."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maect.launch import record
from maect.launch.record import Job

STOPPED = "stopped by the user"
NOT_ACCEPTED_YET = "not accepted for now"  # begins the ending of a job that is submitted again


@dataclass(frozen=True)
class Notice:
    """Statement of a cluster about a job.

    Attributes:
        phase: "unknown" is no verdict: the question failed, ask again.
        text: the cluster's own word (and its reason).
        grace: seconds for which an end must last before it is believed.
        rank: the rank that seems to have caused the end.
        final: a person ended it.
        hint: what a person has to do before anything happens; "": nothing.
    """

    phase: Literal["unknown", "pending", "running", "ended"]
    text: str = ""
    grace: float = 0.0
    rank: int | None = None
    final: bool = False
    hint: str = ""


class Cluster(ABC):
    """Place where jobs run. It may remember what it has seen: keep one while you watch."""

    interval: float  # seconds between two polls
    record_patience: float  # seconds for a completion record to cross the file system
    out_of_reach: str  # why a job could not be ended

    def site(self) -> str | None:
        """Return what the cluster calls itself, if it has a name."""
        return None

    @abstractmethod
    def poll(self, folder: Path, job: Job) -> Notice:
        """Return what the cluster says about a job."""

    def waits(self, folder: Path, job: Job) -> bool:
        """Return whether a job that a poll found pending is so now: the poll may be old."""
        return self.poll(folder, job).phase == "pending"

    @abstractmethod
    def finish(self, folder: Path, job: Job) -> None:
        """Wait for a job that has its completion record to leave, and end what is left of it."""

    @abstractmethod
    def end(self, folder: Path, job: Job) -> bool:
        """End a job, or what is left of it; False if the cluster does not answer."""


@dataclass(frozen=True)
class State:
    """State of a job.

    Attributes:
        notice: what the cluster says; after the end on record, that.
        outcome: of an ended job: its function returned ("done"; "saved": asked to save and return
            before its end), a person ended it ("stopped"), one of its ranks raised or it was never
            accepted ("failed"), it went without a word ("lost").
        failure: what a rank of an ended job said, or the last lines of its log.
    """

    notice: Notice
    outcome: Literal["", "done", "saved", "stopped", "failed", "lost"] = ""
    failure: record.Failure | None = None


def state_of(folder: Path, job: Job, clusters: Mapping[str, Cluster]) -> State:
    """Return what state this job of `folder` is in; LaunchError if nobody here can look at it.

    The ranks' own word counts first, then that of the cluster: the function returned, or it raised,
    whatever became of the processes. A question that the cluster does not answer is no end.
    """
    if job.state == "ended":
        return classify_notice(
            folder, job, Notice("ended", job.ending or "", final=job.ending == STOPPED)
        )
    if not record.is_of(folder, job):
        return classify_notice(folder, job, Notice("ended", f"it is the job of {job.place}"))
    return classify_notice(folder, job, clusters[job.cluster].poll(folder, job))


def classify_notice(folder: Path, job: Job, notice: Notice) -> State:
    """Return what a notice about a job means, with what its ranks say by now."""
    if notice.phase != "ended":
        return State(notice)
    failure = record.failure(folder, job, notice.rank)
    verdict = record.verdict(folder, job)
    if verdict == "done" or job.ending == "done":
        return State(notice, "done", failure)
    if notice.final:
        return State(notice, "stopped", failure)
    if failure.kind or (job.state == "ended" and job.id is None):
        return State(notice, "failed", failure)
    return State(notice, "saved" if verdict else "lost", failure)
