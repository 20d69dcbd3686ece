"""Speed of this machine: a step or two of each stage, measured when somebody asks."""

import logging
import math
import os
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil

from maect.core.errors import counted
from maect.recipes import Encoder, load_encoder
from maect.recipes.memory import CONTEXT
from maect.stages import Training, load_recipe
from maect.stages.base import WithoutLabels
from maect.tools.plan import Device

log = logging.getLogger(__name__)

SECONDS = 1.0
"""For which a step is repeated; at least once, after one that is not counted."""
STEPS = 3
"""At least, with what is prepared for the first."""
LONGEST = 10.0
"""Seconds that a measurement may take, as far as that can be told before."""
MOST_MEMORY = 0.25
"""Part of the free memory that it may take."""
CPU_RANKS = 2
"""Of a training without a GPU (`devices: auto` of the local profile)."""
STEP_FLOPS = 4e10
"""Operations of a step that is measured, which bound its batch: seconds on two cores."""
CGROUP = Path("/sys/fs/cgroup")
"""Limits of the container that this process is in."""
CGROUP_MEMORY = ("memory.max", "memory.current")
INITIALISED = 1e8
"""Weights a second that are drawn at random."""


@dataclass(frozen=True)
class Machine(Device):
    """This machine: one of its GPUs, or its CPU as a whole, whose cores all processes share."""

    name: str = "cpu"
    _speeds: dict[tuple[str, Encoder], float | None] = field(default_factory=dict)
    """Images per second of all processes, by stage and encoder; None: too large to be measured."""
    _rates: list[float] = field(default_factory=list)
    """FLOP/s of all processes, of each step that was measured."""

    @property
    def rate(self) -> float:
        """Return the FLOP/s of a training step: the best measured, else that of such a device."""
        if not self._rates:
            reference = cast(WithoutLabels, load_recipe("mae", "small"))
            self._speed_of(reference, load_encoder("small"))
        return max(self._rates, default=0.0) or super().rate

    @property
    def source(self) -> str:
        """Return where `rate` is from, for people."""
        if not self._rates:
            return super().source
        return f"operations at {self.rate / 1e9:.0f} GFLOP/s, measured here"

    def source_of(self, stage: Training, encoder: Encoder) -> str:
        """Return where the speed of a training is from, for people."""
        if self._speeds.get((stage.name, encoder)) is None:
            return self.source
        return "a step measured on this machine's " + ("CPU" if self.name == "cpu" else self.name)

    def together(self, processes: int) -> float:
        """FLOP/s of this many processes."""
        return self.rate * (1 if self.name == "cpu" else processes)

    def images_per_second(self, stage: Training, encoder: Encoder, processes: int = 1) -> float:
        """Speed of a training on this many processes.

        By its operations if it needs labels, or is too large to be measured.
        """
        speed = self._speed_of(stage, encoder) if isinstance(stage, WithoutLabels) else None
        if speed is None:
            return super().images_per_second(stage, encoder, processes)
        return speed * (1 if self.name == "cpu" else processes)

    def _speed_of(self, stage: WithoutLabels, encoder: Encoder) -> float | None:
        key = stage.name, encoder
        if key not in self._speeds:
            self._speeds[key] = None  # of the reference, too, whose rate it may ask for
            batch = self._batch(stage, encoder)
            if batch is not None:
                log.info("measuring a step of %s, batch %d, on this machine's %s", stage.name,
                         batch, "CPU" if self.name == "cpu" else self.name)  # fmt: skip
                speed = measure(stage, encoder, batch) * self._ranks
                self._speeds[key] = speed
                self._rates.append(speed * stage.flops_per_image(encoder))
        return self._speeds[key]

    @property
    def _ranks(self) -> int:
        return CPU_RANKS if self.name == "cpu" else 1

    def _batch(self, stage: WithoutLabels, encoder: Encoder) -> int | None:
        """Return the images of a step that takes neither too much memory nor too long, if any."""
        guess = super().rate * self._ranks if self.name == "cpu" else math.inf
        batch = self._batch_in_time(stage, encoder, max(self._rates, default=guess))
        if batch is None and not self._rates:
            batch = self._batch_in_time(stage, encoder, self.rate)  # by a smaller one's step
        if batch is None:
            return None
        step = stage.model_copy(update={"batch_size": batch})
        memory = step.peak_memory(encoder, 1) - (CONTEXT if self.name == "cpu" else 0)
        return batch if memory <= MOST_MEMORY * self.free_memory() else None

    def _batch_in_time(self, stage: WithoutLabels, encoder: Encoder, rate: float) -> int | None:
        build = stage.footprint(encoder, 1).weights / INITIALISED
        operations = (LONGEST - build) * rate / self._ranks / STEPS
        batch = batch_to_measure(stage, encoder, min(STEP_FLOPS, operations))
        return batch if batch * stage.flops_per_image(encoder) <= operations else None

    def free_memory(self) -> float:
        """Return the bytes that are free on the device; on a CPU, within this process's limit."""
        if self.name != "cpu":
            import torch

            return float(torch.cuda.mem_get_info()[0])
        free = [float(psutil.virtual_memory().available)]
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            free.append(float(limit - psutil.Process().memory_info().vms))
        with suppress(OSError, ValueError):  # no container, or one without a limit
            most, taken = (int(Path(CGROUP, name).read_text()) for name in CGROUP_MEMORY)
            free.append(float(most - taken))
        return min(free)


def batch_to_measure(stage: WithoutLabels, encoder: Encoder, operations: float) -> int:
    """Return the images of a step of about so many operations, at least two.

    A part of the training's batch, so that it divides the queue as that does.
    """
    most = operations / stage.flops_per_image(encoder)
    parts = [n for n in range(2, stage.batch_size + 1) if stage.batch_size % n == 0] or [2]
    return max([n for n in parts if n <= most], default=parts[0])


def busy() -> list[str]:
    """Return a line if other programs kept this machine's cores busy in the last minute."""
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    if load < 1.5 * cores:
        return []
    return [
        f"The machine was busy (load {load:.0f} on {counted(cores, 'core')}) when this was "
        "measured: ask again when it is quiet."
    ]


def this_machine() -> Machine:
    """Return the device that trainings would use on this machine."""
    import torch

    return Machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def measure(stage: WithoutLabels, encoder: Encoder, batch: int) -> float:
    """Measure the images per second of one rank's training step with random weights.

    A CPU's rank has its share of the cores, as in a training: with all of them, and others at work
    beside it, each operation would wait for the slowest. The fastest step counts.

    Args:
        batch: images in a step.
    """
    import torch

    from maect.core.context import Context
    from maect.train.engine import single_rank_group
    from maect.train.timing import step_seconds, unsaved_trainer

    threads = torch.get_num_threads()

    stage = stage.model_copy(update={"batch_size": batch})
    objective = stage.objective(encoder, 0)
    rank = Context(max(1, len(os.sched_getaffinity(0)) // CPU_RANKS), torch.cuda.is_available())
    try:
        with (
            single_rank_group(rank) as device,
            unsaved_trainer(stage, objective, rank, device, 100) as trainer,
        ):
            return batch / min(step_seconds(trainer, 2, SECONDS)[1:])
    finally:
        torch.set_num_threads(threads)
