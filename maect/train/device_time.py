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
        self, context: Context, useful: float, logged: Mapping[str, Any] = {}, shown: int = 8
    ) -> None:
        """Go on from a state.

        Args:
            context: this rank's.
            useful: seconds x ranks of the steps before, by the state's record.
            logged: timing of the run's last log entry, whether its step was kept or not.
            shown: number of last steps whose mean is the speed.
        """
        self._context = context
        self.useful = useful
        self._before = float(logged.get("device_seconds", 0.0))
        self._held_before = float(logged.get("held_seconds", 0.0))
        self._steps = 0
        self._recent = deque[float](maxlen=shown)
        self._evaluating = 0.0
        self.start()

    def start(self) -> None:
        """Begin the first step of an attempt."""
        self._began = time.monotonic()
        self._stepped = self._began

    @contextmanager
    def outside_steps(self, useful: bool, online: bool = False) -> Iterator[None]:
        """Leave the block's time out of the step.

        Args:
            useful: whether it counts as useful, as an evaluation does and a save does not.
            online: whether it is an online evaluation, whose share is logged.
        """
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self._stepped += spent
        if useful:
            self.useful += spent * self._context.world_size
        if online:
            self._evaluating += spent

    def step(self) -> float:
        """Return the seconds of the step that ends now, its wait for the batch included."""
        now = time.monotonic()
        seconds = now - self._stepped
        self._stepped = now
        self._steps += 1
        # The first step warms up: the second one counts twice.
        if self._steps == 2:
            self.useful += 2 * seconds * self._context.world_size
        elif self._steps > 2:
            self.useful += seconds * self._context.world_size
        self._recent.append(max(seconds, 1e-9))
        return self._recent[-1]

    @property
    def steps_per_second(self) -> float:
        """Mean speed of the last steps, with their waits for the loader."""
        return len(self._recent) / sum(self._recent)

    @property
    def device_seconds(self) -> float:
        """Seconds x ranks for which the run's jobs held their devices, as far as they logged."""
        seconds = time.monotonic() - self._context.began
        return self._held_before + seconds * self._context.world_size

    @property
    def online_part(self) -> float:
        """Share of the attempt's time that online evaluations took, 0 to 1."""
        return self._evaluating / max(time.monotonic() - self._began, 1e-9)

    @property
    def timing(self) -> dict[str, float]:
        """Entries of the log, in seconds x ranks."""
        seconds = time.monotonic() - self._began
        return {
            "device_seconds": self._before + seconds * self._context.world_size,
            "held_seconds": self.device_seconds,
            "useful_seconds": self.useful,
        }
