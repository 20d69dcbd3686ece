"""The one set-up of `logging`: for commands that people start, and for the ranks of a job.

Modules say `log = logging.getLogger(__name__)` and then `log.info(...)` or `log.warning(...)`.
`print` is for what a command was asked for (a table, the name of a file), which goes to stdout.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

CONTROL = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}
"""Characters that a terminal obeys, to be escaped: file names may contain them."""
CLOSED = {errno.EBADF, errno.EIO, errno.EPIPE}
"""Errors of a terminal or a pipe that is gone."""
CLOCK = "%H:%M:%S"
DATE = "%Y-%m-%d %H:%M:%S"
PROGRESS_SECONDS = 10.0
"""Seconds between messages of how far it is."""


@contextmanager
def command_log(file: str | Path | None = None) -> Iterator[None]:
    """Send messages to stderr, each with its time, and to the end of a log file if there is one."""
    # On a terminal the date is known; a log may be read weeks later.
    handlers: list[logging.Handler] = [_Stderr(_Lines(CLOCK if is_watched() else DATE))]
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
        handlers[-1].setFormatter(_Lines(DATE))
    root = logging.getLogger()
    ours = logging.getLogger("maect")
    level = ours.level
    ours.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def rank_log(rank: int) -> None:
    """Let every message of this process carry time, level and rank, for the rest of its life."""
    form = f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
    logging.getLogger().addHandler(_Stderr(logging.Formatter(form, DATE)))
    logging.getLogger("maect").setLevel(logging.INFO)
    logging.captureWarnings(True)


def progress(where: object, total: int) -> Callable[[int], None]:
    """Return a function to call with the number of images done, which logs it now and then."""
    said = time.monotonic()

    def report(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            log.info("%s: %d of %d images", where, done, total)

    return report


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return the lines of a table; `right`: numbers of the columns to align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(w) if n in right else cell.ljust(w)
            for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(row) for row in rows]


def is_watched() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


class _Lines(logging.Formatter):
    """`[12:03:04] message`; an error that ends a command begins with the command's name instead."""

    def __init__(self, clock: str) -> None:
        super().__init__("[%(asctime)s] %(mark)s%(message)s", clock)

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.ERROR:
            return record.getMessage().translate(CONTROL)
        record.mark = "warning: " if record.levelno == logging.WARNING else ""
        return super().format(record).translate(CONTROL)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to stderr, which may be a terminal that is closed some day."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing more on a terminal that was closed.

        What Python still holds for it goes nowhere: else the process would end with status 120.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            with suppress(OSError):
                super().handleError(record)
        elif error.errno in CLOSED:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                if nowhere != self.stream.fileno():  # the number may be free by now
                    os.dup2(nowhere, self.stream.fileno())
                    os.close(nowhere)
