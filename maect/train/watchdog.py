"""Ends a step that does not end, and names the rank that the others wait for.

A collective waits for its last rank without saying which one that is. Therefore every rank notes
what it does, and a thread of it writes that down now and then with a number that shows it is alive.
A rank that has waited for too long looks at what the others wrote.
"""

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from maect.core.context import Context
from maect.core.errors import RankError
from maect.train.hooks import Hook

log = logging.getLogger(__name__)

LIMIT = 300.0
"""Seconds of one activity, at most; `LIMIT_VARIABLE` of the environment replaces it."""
LIMIT_VARIABLE = "MAECT_STALL_SECONDS"
STEPS = 5
"""The limit is at least so many times the longest step so far."""
READING = "reading the batch of"
COMPUTING = "computing"
UPDATING = "updating the weights in"
ORDER = (READING, COMPUTING, UPDATING)
"""Activities of a step, which have a limit. The other ones may take any time."""
SAVING = "saving the state before"
SCORING = "scoring the epoch after"
EVALUATING = "evaluating the encoder after"


class StalledError(RankError):
    """A rank is missing; another attempt from the last state may succeed."""


class Watchdog(Hook):
    """Watches the steps of this rank, which notes each activity that it begins.

    The first step, with its compilation and set-up, has no limit: only a rank that gives no sign of
    life is a fault then. A process that was suspended starts to count again.
    """

    def __init__(self, folder: Path, context: Context) -> None:
        self.context = context
        self.folder = folder / "heartbeats"
        self.limit = float(os.environ.get(LIMIT_VARIABLE, LIMIT))
        self._tick = min(30.0, self.limit / 10)
        self._doing = (0, READING, time.monotonic())
        self._ticked = time.monotonic()
        self._resumed = float("-inf")
        self._began: float | None = None
        self._longest: float | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="maect-watchdog")
        if context.world_size > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._thread.start()

    def begin(self, activity: str, step: int) -> None:
        """Note what this rank does now; `step` counts from 1. Cheap."""
        now = time.monotonic()
        if activity == READING:
            if self._began is not None:
                self._longest = max(self._longest or 0.0, now - self._began)
            self._began = now
        self._doing = (step, activity, now)

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
            self._file(self.context.rank).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()  # by the last one to leave

    def _watch(self) -> None:
        while not self._closed.wait(self._tick):
            self.tick()

    def tick(self) -> None:
        """Write this rank's activity and check the others'; a thread calls it at intervals."""
        now = time.monotonic()
        if now - self._ticked > 3 * self._tick + 1:  # suspended, and perhaps the others with us
            self._resumed = now
        self._ticked = now
        self._write()
        fault = self._fault()
        if fault:
            faulthandler.dump_traceback()
            self.context.fail(fault)

    def _write(self) -> None:
        """Write this rank's activity for the others; without fsync, since it is a hint."""
        self._number += 1
        step, activity, since = self._doing
        value = {
            "number": self._number, "step": step, "activity": activity,
            "seconds": time.monotonic() - max(since, self._resumed),
            "who": f"rank {self.context.rank} ({socket.gethostname()}, process {os.getpid()})",
        }  # fmt: skip
        file = self._file(self.context.rank)
        with suppress(OSError):  # a full disk must not end the training
            file.with_suffix(".tmp").write_text(json.dumps(value), encoding="utf-8")
            file.with_suffix(".tmp").replace(file)

    def _fault(self) -> StalledError | None:
        """Return the fault of a rank that this one has waited for too long, or None."""
        now = time.monotonic()
        step, activity, since = self._doing
        waited = now - max(since, self._resumed)
        limit = max(self.limit, STEPS * (self._longest or 0.0))
        if waited < limit / 2:
            self._seen.clear()
            return None
        others = self._others(now)
        if waited < limit:
            return None
        waits = f"this rank has waited {waited:.0f} s for it, {activity} step {step}"
        for rank, value in others.items():
            if activity not in ORDER and not value["number"]:
                continue  # it is done and has removed its file, while this rank still writes
            silent = now - self._seen[rank][1]
            if silent >= limit / 2:
                who = value.get("who", f"rank {rank}")
                fault = f"{who} has given no sign of life for {silent:.0f} s; {waits}"
                return StalledError(fault)
        # A save or an evaluation may take any time: only silence is a fault then.
        activities = [activity, *(value.get("activity") for value in others.values())]
        if self._longest is None or any(one not in ORDER for one in activities):
            return None
        for value in others.values():
            behind = (value["step"], ORDER.index(value["activity"])) < (step, ORDER.index(activity))
            if behind and value["seconds"] >= limit / 2:
                where = f"{value['activity']} step {value['step']} for {value['seconds']:.0f} s"
                return StalledError(f"{value['who']} has been {where}; {waits}")
        if waited < 2 * limit:
            return None
        all_of_them = f"all ranks have been {activity} step {step} for {waited:.0f} s"
        return StalledError(f"{all_of_them}: a device may hang")

    def _others(self, now: float) -> dict[int, dict[str, Any]]:
        """Return what the other ranks wrote last; note in `_seen` when each number was new."""
        others = {}
        for rank in set(range(self.context.world_size)) - {self.context.rank}:
            value = self._read(rank)
            if rank not in self._seen or self._seen[rank][0] != value["number"]:
                self._seen[rank] = (value["number"], now)
            others[rank] = value
        return others

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads(self._file(rank).read_text(encoding="utf-8"))
            return value
        except (OSError, ValueError):
            return {"number": 0}

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:04d}.json"
