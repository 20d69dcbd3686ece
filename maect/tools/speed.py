"""Speed of this machine: a step of pre-training, measured when somebody asks."""

import logging
import os
from dataclasses import dataclass, field
from typing import cast

from maect.recipes import Encoder, load_encoder
from maect.stages import Training, load_recipe
from maect.stages.base import SelfSupervised
from maect.tools.plan import Device

log = logging.getLogger(__name__)

SECONDS = 1.0
"""Seconds for which a step is repeated; at least once, after one that is not counted."""
CPU_RANKS = 2
"""Ranks of a training without a GPU (`devices: auto` of the local profile)."""
STEP_FLOPS = {"cpu": 4e10, "cuda": 4e12}
"""Operations of a step that is measured, which bound its batch: seconds on two cores."""
WIDEST = {"cpu": "small", "cuda": "base"}
"""The widest encoder that is measured: the products of wider ones are about as fast."""


@dataclass(frozen=True)
class Machine(Device):
    """This machine: one of its GPUs, or its CPU as a whole, whose cores all processes share."""

    name: str = "cpu"
    _rates: dict[Encoder, float] = field(default_factory=dict)
    """FLOP/s of a training step of all processes, by what was measured."""

    @property
    def rate(self) -> float:
        """Return the FLOP/s of a training step of the widest encoder that is measured."""
        return self._rate_of(load_encoder(self._widest))

    @property
    def source(self) -> str:
        """Return where `rate` is from, for people."""
        return f"operations at {self.rate / 1e9:.0f} GFLOP/s, measured here"

    def together(self, processes: int) -> float:
        """FLOP/s of this many processes."""
        return self.rate * (1 if self.name == "cpu" else processes)

    def images_per_second(self, stage: Training, encoder: Encoder, processes: int = 1) -> float:
        """Speed of a training on this many processes, by its operations."""
        widest = load_encoder(self._widest)
        rate = self._rate_of(encoder if encoder.width < widest.width else widest)
        return rate * (1 if self.name == "cpu" else processes) / stage.flops_per_image(encoder)

    @property
    def _kind(self) -> str:
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def _widest(self) -> str:
        return WIDEST[self._kind]

    def _rate_of(self, encoder: Encoder) -> float:
        if encoder not in self._rates:
            stage = cast(SelfSupervised, load_recipe("mae", self._widest))
            operations = stage.flops_per_image(encoder)
            batch = max(2, min(stage.batch_size, int(STEP_FLOPS[self._kind] / operations)))
            log.info("measuring a training step on this machine's %s", self.name.upper())
            ranks = CPU_RANKS if self.name == "cpu" else 1
            self._rates[encoder] = ranks * operations * measure(stage, encoder, batch)
        return self._rates[encoder]


def this_machine() -> Machine:
    """Return the device that trainings would use on this machine."""
    import torch

    return Machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def measure(stage: SelfSupervised, encoder: Encoder, batch: int) -> float:
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
