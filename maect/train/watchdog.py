"""Ends a step that does not end.

A collective waits for its last rank without saying which one that is, so every rank notes what it
does and has a deadline for it. Reading waits for no other rank and has half the time of the rest:
a rank that cannot read says so before those that wait for it.
"""

import faulthandler
import os
import socket
import threading
import time

from maect.core.context import Context
from maect.core.errors import RankError
from maect.train.hooks import Hook

LIMIT = 300.0
"""Seconds to read a batch, at most; `LIMIT_VARIABLE` of the environment replaces it."""
LIMIT_VARIABLE = "MAECT_STALL_SECONDS"
STEPS = 5
"""Factor on the longest step so far: the limit is at least this product."""
READING = "reading the batch of"
COMPUTING = "computing"
UPDATING = "updating the weights in"
LIMITED = (READING, COMPUTING, UPDATING)
"""Activities of a step, which have a limit. The other ones may take any time."""
SAVING = "saving the state before"
SCORING = "scoring the epoch after"
EVALUATING = "evaluating the encoder after"


class StalledError(RankError):
    """A step does not end; another attempt from the last state may succeed."""


class Watchdog(Hook):
    """Watches the steps of this rank.

    The first step, with its compilation and set-up, has no limit. A process that was suspended
    starts to count again.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.limit = float(os.environ.get(LIMIT_VARIABLE, LIMIT))
        self._tick = min(30.0, self.limit / 10)
        self._doing = (READING, 0, time.monotonic())
        self._ticked = time.monotonic()
        self._resumed = float("-inf")
        self._taken: float | None = None  # seconds of the current step, without saves and scores
        self._longest: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="maect-watchdog")
        self._thread.start()

    def begin(self, activity: str, step: int) -> None:
        """Note the current activity of this rank; `step` counts from 1. Cheap."""
        now = time.monotonic()
        doing, _, since = self._doing
        if self._taken is not None and doing in LIMITED:
            self._taken += now - since
        if activity == READING:
            if self._taken is not None:
                self._longest = max(self._longest or 0.0, self._taken)
            self._taken = 0.0
        self._doing = (activity, step, now)

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._tick):
            self.tick()

    def tick(self) -> None:
        """End the job if this rank has passed its deadline; a thread calls it at intervals."""
        now = time.monotonic()
        if now - self._ticked > 3 * self._tick + 1:  # suspended, and perhaps the others with us
            self._resumed = now
        self._ticked = now
        activity, step, since = self._doing
        if self._longest is None or activity not in LIMITED:
            return
        limit = max(self.limit, STEPS * self._longest)
        if activity != READING:
            limit *= 2
        waited = now - max(since, self._resumed)
        if waited < limit:
            return
        faulthandler.dump_traceback()
        who = f"rank {self.context.rank} ({socket.gethostname()}, process {os.getpid()})"
        fault = f"{who} has been {activity} step {step} for {waited:.0f} s"
        if activity != READING:
            missing = "another rank is missing, or " if self.context.world_size > 1 else ""
            fault += f": {missing}a device hangs"
        self.context.fail(StalledError(fault))
