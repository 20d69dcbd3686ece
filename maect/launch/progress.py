"""Display of a launcher: epoch, step, loss, images/s, time left."""

import logging
import time
from typing import Any

from maect.core.errors import counted

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
LATER_LOG_SECONDS = 60.0  # after ten minutes: a log of days must stay readable


def describe(progress: dict[str, Any]) -> str:
    """Return one line on a report of `Rank.report`; unknown keys are left out.

    The time left follows from the steps done since this attempt began, not from those before it.
    """
    parts = []
    for key, total in (("epoch", "epochs"), ("step", "steps")):
        if key in progress:
            of = f"/{progress[total]}" if total in progress else ""
            parts.append(f"{key} {progress[key]}{of}")
    for key, text in (
        ("loss", "loss {:.4f}"), ("knn", "online k-NN {:.1f} %"),
        ("images_per_second", "{:.0f} images/s"),
    ):  # fmt: skip
        if _is_number(progress.get(key)):
            parts.append(text.format(progress[key]))
    left = seconds_left(progress)
    if left:
        parts.append(f"{rough(left)} left")
    return "  ".join(parts)


def seconds_left(progress: dict[str, Any]) -> float | None:
    """Return the seconds until the last step at this attempt's mean speed, or None if unknown."""
    try:
        done = progress["step"] - progress["first_step"]
        left = progress["steps"] - progress["step"]
        return float(progress["seconds"]) / done * left if done > 0 else None
    except (KeyError, TypeError):
        return None


def part(progress: dict[str, Any]) -> float | None:
    """Return the part of the steps that is done, or None if unknown."""
    step = progress.get("step")
    steps = progress.get("steps")
    return step / steps if isinstance(step, int) and isinstance(steps, int) and steps else None


def rough(seconds: float) -> str:
    """Return a rounded duration: `40 seconds`, `8 minutes`, `3.5 hours`, `12 days`."""
    if seconds < 90:
        return counted(round(seconds), "second")
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ProgressLine:
    """Messages of a launcher and its progress, in the log: a line now and then."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._start = time.monotonic()
        self._shown_at = float("-inf")
        self._shown = ""
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Log a message, unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            self._log(text)

    def is_due(self) -> bool:
        """Return whether it is time to show the progress again."""
        now = time.monotonic()
        wait = LOG_SECONDS if now - self._start < 600 else LATER_LOG_SECONDS
        return now - self._shown_at >= wait

    def show(self, text: str) -> None:
        """Log a line on the progress unless it is unchanged."""
        if not text or text == self._shown:
            return
        self._shown = text
        self._shown_at = time.monotonic()
        self._log(text)

    def _log(self, text: str) -> None:
        log.info("%s: %s", self.title, text)
