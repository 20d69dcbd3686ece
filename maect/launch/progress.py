"""The live line of a launcher: epoch, step, loss, images/s, time left."""

import sys
import time
from typing import Any

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 10.0
LATER_LOG_SECONDS = 60.0  # after ten minutes: a log of days must stay readable


def describe(progress: dict[str, Any]) -> str:
    """One line from a report; keys that it does not know are left out.

    The time left follows from the steps done since this attempt began, not from those before it.
    """
    parts = []
    for key, total in (("epoch", "epochs"), ("step", "steps")):
        if key in progress:
            whole = f"/{progress[total]}" if total in progress else ""
            parts.append(f"{key} {progress[key]}{whole}")
    if _is_number(progress.get("loss")):
        parts.append(f"loss {progress['loss']:.4f}")
    if _is_number(progress.get("images_per_second")):
        parts.append(f"{progress['images_per_second']:.0f} images/s")
    left = seconds_left(progress)
    if left:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def seconds_left(progress: dict[str, Any]) -> float | None:
    """Seconds until the last step at the mean speed of this attempt, or None if unknown."""
    try:
        done = progress["step"] - progress["first_step"]
        rest = progress["steps"] - progress["step"]
        return float(progress["seconds"]) / done * rest if done > 0 else None
    except (KeyError, TypeError):
        return None


def duration(seconds: float) -> str:
    """`1d 02:03:04`, without the day when there is none."""
    days, rest = divmod(round(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Line:
    """Messages and the progress line on stderr: rewritten on a terminal, now and then in a log."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._shown_at = float("-inf")
        self._shown = ""
        self._open = False  # an unfinished line stands on the terminal

    def say(self, text: str) -> None:
        """Print a message that stays."""
        self.close()
        self._write(f"[{time.strftime('%H:%M:%S')}] {self.title}: {text}\n")

    def is_due(self) -> bool:
        """Whether it is time to show the state again, for the reader's sake."""
        now = time.monotonic()
        if self._terminal:
            wait = TERMINAL_SECONDS
        else:
            wait = LOG_SECONDS if now - self._start < 600 else LATER_LOG_SECONDS
        return now - self._shown_at >= wait

    def show(self, text: str) -> None:
        """Show the present state, unless nothing has changed."""
        if not text or text == self._shown:
            return
        self._shown, self._shown_at = text, time.monotonic()
        if self._terminal:
            self._write(f"\r\033[K{self.title}: {text}")
            self._open = True
        else:
            self.say(text)

    def close(self) -> None:
        """End the line that stands on the terminal."""
        if self._open:
            self._write("\n")
            self._open = False

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            pass  # the terminal was closed; the job is worth more than its progress line
