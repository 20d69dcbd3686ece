"""A window of steps under torch.profiler, written as a trace that browsers show."""

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.train.hooks import Hook
from maect.train.watchdog import COMPUTING

TRACES = "traces"
"""Folder of a run with its traces."""


def steps_of(window: str, steps: int) -> range:
    """Return the steps, from 1, of a window such as `100-105`, or raise UserError."""
    match = re.fullmatch(r"(\d+)-(\d+)", window)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(f"--trace {window}: first and last step, within 1-{steps}, such as 100-105")
    return range(first, last + 1)


class Trace(Hook):
    """Profiles some steps of this rank; what is computed is the same."""

    def __init__(self, folder: Path, rank: int, steps: range) -> None:
        """Profile `steps`, from 1, of the run in `folder`."""
        name = f"steps-{steps.start}-{steps.stop - 1}-rank-{rank}.json"
        self._path = folder / TRACES / name
        self._steps = steps
        self._profile: profile | None = None

    def begin(self, activity: str, step: int) -> None:
        """Start profiling at the window's first step, and write the trace behind the last one."""
        if activity != COMPUTING:
            return
        if step not in self._steps:
            self.close()
        elif self._profile is None:
            kinds = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=kinds, record_shapes=True)
            self._profile.start()

    def close(self) -> None:
        """Write what was profiled, if anything was."""
        if self._profile is not None:
            self._profile.stop()
            with atomic_write(self._path) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            self._profile = None
