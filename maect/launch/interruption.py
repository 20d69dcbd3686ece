"""Requests to a launcher to stop its job or to let go of it."""

import contextlib
import signal
from types import FrameType

from maect.launch.owner import Ancestors


class Interruption(contextlib.AbstractContextManager["Interruption"]):
    """Ctrl-C and SIGTERM stop the job; SIGHUP and the death of Snakemake let go of it.

    Args:
        detach: Ctrl-C and SIGTERM let go too.
    """

    def __init__(self, detach: bool) -> None:
        self.stops = 0  # how often we were asked to stop the job
        self._let_go = False
        self._detach = detach
        self._ancestors = Ancestors()

    def __enter__(self) -> "Interruption":
        handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: self._go}
        self._before = {number: signal.signal(number, to) for number, to in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def let_go(self) -> str | None:
        """Why to leave the job alone and go, or None."""
        if self._let_go:
            return "detached"
        return None if self._ancestors.are_alive() else "Snakemake is gone"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._detach:
            self._let_go = True
        else:
            self.stops += 1

    def _go(self, number: int, frame: FrameType | None) -> None:
        self._let_go = True
