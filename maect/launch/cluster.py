"""What the launcher asks of a cluster."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maect.launch.record import Job


@dataclass(frozen=True)
class Look:
    """What a cluster says about a job.

    Attributes:
        phase: "unknown" is no verdict: the question failed, ask again.
        text: the cluster's own word (and its reason).
        grace: seconds for which an end must last before it is believed.
        rank: the rank that seems to have caused the end.
        final: a person ended it.
    """

    phase: Literal["unknown", "pending", "running", "ended"]
    text: str = ""
    grace: float = 0.0
    rank: int | None = None
    final: bool = False


class Cluster(ABC):
    """Where jobs run. It may remember what it has seen: one object for as long as one watches."""

    interval: float  # seconds between two looks
    record_patience: float  # seconds for a completion record to cross the file system

    @abstractmethod
    def look(self, folder: Path, job: Job) -> Look:
        """Look at a job."""

    @abstractmethod
    def finish(self, folder: Path, job: Job) -> None:
        """Wait for a job that has its completion record to leave, and end what is left of it."""

    @abstractmethod
    def end(self, folder: Path, job: Job) -> bool:
        """End a job, or what is left of it; False if the cluster does not answer."""
