"""State of a job: what its cluster says of it, combined with the reports of its ranks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maect.core.resources import Resources
from maect.launch import record
from maect.launch.record import Job, LaunchError

STOPPED = "stopped by the user"
NOT_ACCEPTED_YET = "not accepted for now"  # begins the ending of a job that is submitted again
TEARDOWN = 30.0  # seconds for the ranks to leave after they have returned


@dataclass(frozen=True)
class Notice:
    """Statement of a cluster about a job.

    Attributes:
        phase: "unknown" is no verdict: the question failed, ask again.
        text: the cluster's own word (and its reason).
        grace: seconds for which an end must last before it is believed.
        final: a person ended it.
        hint: advice to a person without whom nothing will happen, or "".
    """

    phase: Literal["unknown", "pending", "running", "ended"]
    text: str = ""
    grace: float = 0.0
    final: bool = False
    hint: str = ""


class Cluster(ABC):
    """Place where jobs run.

    Attributes:
        interval: seconds between two polls.
        record_patience: seconds for a completion record to cross the file system.
    """

    interval: float
    record_patience: float

    @abstractmethod
    def site(self) -> str | None:
        """Return the cluster's own name; None if it does not answer."""

    @abstractmethod
    def submit(self, folder: Path, job: Job, resources: Resources) -> None:
        """Submit the job on record and set its id.

        Raises:
            LaunchError, RuntimeError, ValueError: it was not accepted.
        """

    @abstractmethod
    def poll(self, folder: Path, job: Job) -> Notice:
        """Ask the cluster about a job; LaunchError if it is one of another site."""

    @abstractmethod
    def has_left(self, folder: Path, job: Job) -> bool:
        """Return whether a job that has its completion record needs its place no longer."""

    @abstractmethod
    def end(self, folder: Path, job: Job) -> bool:
        """End a job or its remains; return False if the cluster does not answer."""

    def finish(self, folder: Path, job: Job) -> None:
        """Wait for a job with a completion record to leave; then end its remains.

        A signal in its last second may have put a complete job back into the queue.
        """
        deadline = time.monotonic() + TEARDOWN
        while not self.has_left(folder, job):
            if time.monotonic() > deadline:
                self.end(folder, job)
                return
            time.sleep(0.2)


def check_site(job: Job, here: str) -> None:
    """Refuse to conclude anything about a job of another machine or cluster (LaunchError)."""
    if job.site not in (None, here):
        raise LaunchError(
            f"{job} was started on {job.site}, and this is {here}: start there, or delete "
            f"{Path(job.place) / 'job.json'} if that is gone for good"
        )


def notice_of(folder: Path, job: Job, clusters: Mapping[str, Cluster]) -> Notice:
    """Return the notice of a job; raise LaunchError if it cannot be seen from here.

    A machine or a cluster may hide a job from other users, and then says that there is none.
    """
    if job.state == "ended":
        return Notice("ended", job.ending or "", final=job.ending == STOPPED)
    notice = clusters[job.cluster].poll(folder, job)
    if notice.phase == "ended" and not record.is_ours(folder, job):
        return Notice("unknown", "only the user who started its job can see whether it runs")
    return notice


def outcome(
    folder: Path, job: Job, notice: Notice
) -> Literal["done", "stopped", "failed", "saved", "lost"]:
    """Return how a job ended.

    The ranks' reports count before the cluster's word: a function that returned or raised did so,
    whatever became of its processes.

    Returns:
        "done": its function returned; "saved": it was asked to save and returned before its end;
        "stopped": a person ended it; "failed": one of its ranks raised, or it was never accepted;
        "lost": it went without a word.
    """
    verdict = record.verdict(folder, job)
    if verdict == "done" or job.ending == "done":
        return "done"
    if notice.final:
        return "stopped"
    if job.id is None or record.first_error(folder, job) is not None:
        return "failed"
    return "saved" if verdict else "lost"
