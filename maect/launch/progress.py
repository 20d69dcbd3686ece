"""Display of a launcher: epoch, step, loss, images/s, time left."""

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from maect.core.errors import counted
from maect.core.log import is_watched

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

TERMINAL_SECONDS = 0.5
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
    """Messages of a launcher and its progress: a bar on a terminal, a line now and then in a log.

    The messages go through `logging`.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._watched = is_watched()
        self._bar: Progress | None = None
        self._start = time.monotonic()
        self._shown_at = float("-inf")
        self._shown = ""
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Log a message, unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            self._log(text)

    def _log(self, text: str) -> None:
        log.info("%s: %s", self.title, text)

    def is_due(self) -> bool:
        """Return whether it is time to show the progress again."""
        now = time.monotonic()
        if self._watched:
            wait = TERMINAL_SECONDS
        else:
            wait = LOG_SECONDS if now - self._start < 600 else LATER_LOG_SECONDS
        return now - self._shown_at >= wait

    def show(self, text: str, part: float | None) -> None:
        """Show a line on the progress unless it is unchanged; `part` of it is done, if known."""
        if not text or text == self._shown:
            return
        self._shown = text
        self._shown_at = time.monotonic()
        if self._watched:
            self._draw(text, part)
        else:
            self._log(text)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            with suppress(OSError):  # the terminal was closed
                self._bar.stop()
            self._bar = None

    def _draw(self, text: str, part: float | None) -> None:
        # Only for who watches: the import takes 10 MB.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        cell = Column(no_wrap=True, overflow="ellipsis")
        with suppress(OSError):
            if self._bar is None:
                columns = [TextColumn(self.title), BarColumn(20)]
                words = TextColumn("{task.description}", markup=False, table_column=cell)
                console = Console(stderr=True)
                self._bar = Progress(*columns, words, console=console, auto_refresh=False,
                                     redirect_stdout=False, transient=True)  # fmt: skip
                self._bar.add_task("")
                self._bar.start()
            total = None if part is None else 1.0
            task = self._bar.task_ids[0]
            self._bar.update(task, description=text, completed=part or 0.0, total=total)
            self._bar.refresh()
