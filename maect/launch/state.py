"""What a cluster says about a job."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class State:
    """One look at a job.

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
