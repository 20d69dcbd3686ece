"""Finds ranks for which all others wait in every step, from what each says about its own steps.

All ranks leave an exchange together, so the time of a whole step says nothing. What a rank does
before it does: it waits for its batch, and runs the forward pass. A slow link makes no rank slower
than another in either, and is not found. Nor is a slow device where ranks exchange in the forward
pass itself: under ZeRO 3, and with a head, whose forward passes are not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

FACTOR = 1.5  # times what the others need
SHARE = 0.1  # and by this part of a step


@dataclass(frozen=True)
class Pace:
    """Time of a rank's steps so far: their number, seconds for batches, for forward passes."""

    steps: int = 0
    data: float = 0.0
    device: float = 0.0


@dataclass(frozen=True)
class Slow:
    """A rank that is slow in something: seconds a step, and those of the others."""

    rank: int
    at: str
    seconds: float
    others: float


class Stragglers:
    """Compares the ranks' paces from tick to tick; each straggler is found once."""

    def __init__(self, patience: float) -> None:
        """Find what has lasted for this many seconds."""
        self._patience = patience
        self._before: tuple[float, Mapping[int, Pace]] | None = None
        self._since: dict[tuple[int, str], float] = {}
        self._reported: set[tuple[int, str]] = set()

    def compare(self, now: float, paces: Mapping[int, Pace]) -> list[Slow]:
        """Return who has been slow for long by now."""
        then, before = self._before or (now, paces)
        steps = {rank: paces[rank].steps - before[rank].steps for rank in paces}
        if self._before is not None and min(steps.values()) < 1:
            return []
        self._before = now, dict(paces)
        slow = {}
        for at in ("data", "device") if min(steps.values()) else ():
            took = {
                rank: (getattr(pace, at) - getattr(before[rank], at)) / steps[rank]
                for rank, pace in paces.items()
            }
            others = median_low(took.values())
            enough = max(FACTOR * others, others + SHARE * (now - then) / min(steps.values()))
            for rank, seconds in took.items():
                if seconds > enough:
                    slow[rank, at] = Slow(rank, at, seconds, others)
        self._since = {key: self._since.get(key, then) for key in slow}
        due = {key for key, since in self._since.items() if now - since >= self._patience}
        new, self._reported = due - self._reported, self._reported | due
        return [slow[key] for key in sorted(new)]
