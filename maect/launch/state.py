"""State of a job: the cluster's notice about it, combined with the reports of its ranks."""

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
        hint: advice to a person without whom nothing will happen, or "".
    """

    phase: Literal["unknown", "pending", "running", "ended"]
    text: str = ""
    grace: float = 0.0
    rank: int | None = None
    final: bool = False
    hint: str = ""


class Cluster(ABC):
    """Place where jobs run.

    Attributes:
        interval: seconds between two polls.
        record_patience: seconds for a completion record to cross the file system.
        out_of_reach: why a job could not be ended.
    """

    interval: float
    record_patience: float
    out_of_reach: str

    def site(self) -> str | None:
        """Return the cluster's own name, if it has one."""
        return None

    @abstractmethod
    def poll(self, folder: Path, job: Job) -> Notice:
        """Ask the cluster about a job."""

    @abstractmethod
    def finish(self, folder: Path, job: Job) -> None:
        """Wait until a job that has its completion record has left; end what is left of it."""

    @abstractmethod
    def end(self, folder: Path, job: Job) -> bool:
        """End a job, or what is left of it; return False if the cluster does not answer."""


@dataclass(frozen=True)
class State:
    """State of a job.

    Attributes:
        notice: the cluster's; after the end on record, that.
        outcome: of an ended job: its function returned ("done"; "saved": asked to save and return
            before its end), a person ended it ("stopped"), one of its ranks raised or it was never
            accepted ("failed"), it went without a word ("lost").
        failure: the error of a rank of an ended job, or the last lines of its log.
    """

    notice: Notice
    outcome: Literal["", "done", "saved", "stopped", "failed", "lost"] = ""
    failure: record.Failure | None = None


def state_of(folder: Path, job: Job, clusters: Mapping[str, Cluster]) -> State:
    """Return the state of a job of `folder`; LaunchError if it cannot be seen from here.

    The ranks' reports count before the cluster's word: a function that returned or raised did so,
    whatever became of its processes.
    """
    if job.state == "ended":
        notice = Notice("ended", job.ending or "", final=job.ending == STOPPED)
    elif not record.is_of(folder, job):
        notice = Notice("ended", f"it is the job of {job.place}")
    else:
        notice = clusters[job.cluster].poll(folder, job)
    return classify_notice(folder, job, notice)


def classify_notice(folder: Path, job: Job, notice: Notice) -> State:
    """Combine a cluster's notice with the ranks' reports into a state."""
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
