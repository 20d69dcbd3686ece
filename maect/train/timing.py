"""Times of the trainer's own steps on random images: nothing is read, saved or evaluated."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from maect.core.context import Context
from maect.data.loader import Batch, Draw, Packed, add_draws, batch_layout, image_names
from maect.recipes.settings import PLAIN, Computing
from maect.train.engine import Engine, random_batch, seconds_between
from maect.train.hooks import CheckHealth, SumLosses, Update
from maect.train.objective import Objective
from maect.train.stage import Training
from maect.train.step import DeviceTime
from maect.train.trainer import Trainer
from maect.train.watchdog import Watchdog

IMAGES = 1_000_000
"""Images of an epoch that is never finished."""


class _CheckNoise(CheckHealth):
    """Checks the embeddings as in a training, and goes on: the encoder sees only noise."""

    def after_step(self, update: Update) -> None:
        super().after_step(update)
        update.fault = None


@contextmanager
def unsaved_trainer(
    stage: Training, objective: Objective, context: Context, device: torch.device, steps: int,
    computing: Computing = PLAIN,
) -> Iterator[Trainer]:  # fmt: skip
    """Yield a trainer with a new engine that saves and logs nothing.

    Args:
        stage: whose steps are trained.
        objective: of the stage; moved to the device.
        context: this rank's.
        device: that computes.
        steps: of the training.
        computing: how.
    """
    objective.to(device)
    groups = stage.parameter_groups(objective)
    engine = Engine(objective, stage, groups, device, computing)
    if stage.encoder_average is not None:
        engine.start_average("encoder.")
    trainer = Trainer(
        context=context, stage=stage, encoder=objective.encoder.settings, objective=objective,
        engine=engine, device=device, images=IMAGES, step=0, steps=steps, saver=None,
        save_seconds=float("inf"), fingerprint="", clock=DeviceTime(context, 0.0),
        accumulation=computing.accumulation,
    )  # fmt: skip
    trainer.hooks = [Watchdog(context), SumLosses(trainer, [])]
    if objective.has_health:
        trainer.hooks.append(_CheckNoise(trainer))
    try:
        yield trainer
    finally:
        trainer.close()


def packed(batch: Batch, draw: Draw, pinned: bool) -> Batch:
    """Return a batch as the loader hands it over: in one piece of memory, with random draws."""
    memory = Packed(batch_layout([tuple(group.shape) for group in batch.images], draw), pinned)
    names = image_names(len(batch.images))
    for name, group in zip(names, batch.images, strict=True):
        memory.tensors[name].copy_(group)
    found = replace(batch, images=tuple(memory.tensors[name] for name in names), packed=memory)
    add_draws(found, draw)
    return found


def step_seconds(trainer: Trainer, steps: int, more: float = 0.0) -> list[float]:
    """Return the seconds of each step of a new trainer, all on one random batch.

    A step lasts from the end of the update before it to the end of its own, on the device: with the
    copy of the batch, augmentation, both passes, the update, averages and whatever waits.

    Args:
        trainer: that has done no step.
        steps: the least number of steps.
        more: seconds within which further steps begin.
    """
    stage = trainer.stage
    on_gpu = trainer.device.type == "cuda"
    batch = random_batch(stage, trainer.encoder, stage.batch_size // trainer.context.world_size)
    if trainer.accumulation == 1:  # as in a training: a part of a batch draws for itself
        batch = packed(batch, trainer.objective.draw, on_gpu)
    marks = []
    began = time.perf_counter()

    def batches() -> Iterator[Batch]:
        while True:
            marks.append(trainer.engine.mark())
            if len(marks) > steps and time.perf_counter() - began >= more:
                return
            yield batch

    trainer.run(batches())
    if on_gpu:
        torch.cuda.synchronize(trainer.device)
    return [seconds_between(first, second) for first, second in itertools.pairwise(marks)]
