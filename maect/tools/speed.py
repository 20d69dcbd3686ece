"""Speed of this machine: a step or two of each stage, measured when somebody asks."""

import os
from dataclasses import dataclass, field

from maect.core.errors import counted
from maect.recipes import Encoder, load_encoder
from maect.stages import Training, load_recipe
from maect.stages.base import WithoutLabels
from maect.tools.plan import Device

SECONDS = 1.0
"""For which a step is repeated; at least once, after one that is not counted."""
CPU_RANKS = 2
"""Of a training without a GPU (`devices: auto` of the local profile)."""
STEP_FLOPS = 4e10
"""Operations of a step that is measured, which bound its batch: seconds on two cores."""


@dataclass(frozen=True)
class Machine(Device):
    """This machine: one of its GPUs, or its CPU as a whole, whose cores all processes share."""

    name: str = "cpu"
    _speeds: dict[tuple[str, Encoder], tuple[float, float]] = field(default_factory=dict)
    """Images per second and FLOP/s, by stage and encoder."""

    @property
    def rate(self) -> float:
        """FLOP/s of a training step: the best that was measured."""
        if not self._speeds:
            self.images_per_second(load_recipe("mae", "small"), load_encoder("small"))
        return max(flops for _, flops in self._speeds.values())

    @property
    def source(self) -> str:
        """Return where `rate` is from, for people."""
        return "a step measured on this machine's " + ("CPU" if self.name == "cpu" else self.name)

    def together(self, processes: int) -> float:
        """FLOP/s of this many processes."""
        return self.rate * (1 if self.name == "cpu" else processes)

    def images_per_second(self, stage: Training, encoder: Encoder, processes: int = 1) -> float:
        """Speed of a training on this many processes; by its operations if it needs labels."""
        if not isinstance(stage, WithoutLabels):
            return super().images_per_second(stage, encoder, processes)
        speed = self._measured(stage, encoder)[0]
        return speed * (1 if self.name == "cpu" else processes)

    def _measured(self, stage: WithoutLabels, encoder: Encoder) -> tuple[float, float]:
        key = stage.name, encoder
        if key not in self._speeds:
            flops = stage.flops_per_image(encoder)
            speed = measure(stage, encoder, int(STEP_FLOPS / flops))
            if self.name == "cpu":
                speed *= CPU_RANKS
            self._speeds[key] = speed, speed * flops
        return self._speeds[key]


def busy() -> list[str]:
    """A line where other programs kept this machine's cores busy in the last minute."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < 1.5 * cores:
        return []
    return [
        f"The machine was busy (load {load:.0f} on {counted(cores, 'core')}) when this was "
        "measured: ask again when it is quiet."
    ]


def this_machine() -> Machine:
    """Return what trainings would compute on here."""
    import torch

    return Machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def measure(stage: WithoutLabels, encoder: Encoder, batch: int) -> float:
    """Images per second of one rank's training step with random weights and images.

    A CPU's rank has its share of the cores, as in a training: with all of them, and others at work
    beside it, each operation would wait for the slowest. The fastest step counts.

    Args:
        batch: images in a step, at most; a divisor of the training's is taken, at least 2.
    """
    import torch

    from maect.core.context import Context
    from maect.train.engine import alone
    from maect.train.timing import step_seconds, trainer_alone

    threads = torch.get_num_threads()

    # A part of the training's batch, so that it divides the queue as that does.
    parts = [n for n in range(2, stage.batch_size + 1) if stage.batch_size % n == 0] or [2]
    batch = max([n for n in parts if n <= batch], default=parts[0])
    stage = stage.model_copy(update={"batch_size": batch})
    objective = stage.objective(encoder, 0)
    rank = Context(max(1, len(os.sched_getaffinity(0)) // CPU_RANKS), torch.cuda.is_available())
    try:
        with alone(rank) as device, trainer_alone(stage, objective, rank, device, 100) as trainer:
            return batch / min(step_seconds(trainer, 2, SECONDS)[1:])
    finally:
        torch.set_num_threads(threads)
