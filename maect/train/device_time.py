"""Device time of a run: how long its jobs hold their devices, and how much of that is kept."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from maect.core.context import Context


class DeviceTime:
    """Times the steps of an attempt, and adds up seconds x ranks of the whole run.

    Attributes:
        useful: seconds x ranks of all steps whose result was kept. Saving is not useful, nor is an
            attempt's set-up: its first step counts as its second.
    """

    def __init__(
        self, context: Context, record: Mapping[str, Any], spent: float = 0.0, shown: int = 8
    ) -> None:
        """Go on from a state's record, empty at the start; `shown` steps make the speed.

        `spent` are seconds x ranks since each attempt's first batch, of the attempts before.
        """
        self._context, self._spent = context, spent
        self.useful: float = record.get("useful_seconds", 0.0)
        # Of jobs that the launcher's record does not know: that of a finished run begins anew, and
        # folders are copied without it.
        self._held_before: float = record.get("held_before", 0.0)
        if context.held_seconds() < (held := record.get("held_seconds", 0.0)):
            self._held_before += held
        self._steps, self._recent, self._evaluating = 0, deque[float](maxlen=shown), 0.0
        self.start()

    def start(self) -> None:
        """Begin the first step of an attempt."""
        self._began = self._stepped = time.monotonic()

    @contextmanager
    def aside(self, useful: bool, online: bool = False) -> Iterator[None]:
        """Time a save, which is no part of a step, or an evaluation, which is kept."""
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self._stepped += spent
        self.useful += spent * self._context.world_size if useful else 0.0
        self._evaluating += spent if online else 0.0

    def step(self) -> float:
        """Return the seconds of the step that ends now, its wait for the batch included."""
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        self._steps += 1
        kept = (0.0, 2.0, 1.0)[min(self._steps, 3) - 1]
        self.useful += kept * seconds * self._context.world_size
        self._recent.append(max(seconds, 1e-9))
        return self._recent[-1]

    @property
    def steps_per_second(self) -> float:
        """Of several steps, whose reading is not even; a loader that is too slow shows."""
        return len(self._recent) / sum(self._recent)

    @property
    def held(self) -> float:
        """Seconds x ranks for which all jobs of the run have held their devices."""
        return self._held_before + self._context.held_seconds()

    @property
    def record(self) -> dict[str, float]:
        """Part of a state's record, to go on from."""
        return {
            "useful_seconds": self.useful,
            "held_before": self._held_before,
            "held_seconds": self._context.held_seconds(),
        }

    def timing(self, evaluated: bool) -> dict[str, float]:
        """Part of a log entry; `evaluated`: with the share of online evaluations."""
        seconds = time.monotonic() - self._began
        timing = {
            "device_seconds": self._spent + seconds * self._context.world_size,
            "held_seconds": self.held,
            "useful_seconds": self.useful,
        }
        share = self._evaluating / max(seconds, 1e-9)
        return timing | ({"online_part": share} if evaluated else {})
