"""Times of the trainer's own steps on random images: nothing is read, saved or evaluated."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from maect.core.context import Context
from maect.data.loader import Batch, Draw, fill, image_names, layout_of
from maect.data.packed import Packed
from maect.recipes.computing import PLAIN, Computing
from maect.train.checkpoint import Saver
from maect.train.device_time import DeviceTime
from maect.train.engine import Engine, seconds_between
from maect.train.noise import random_batch
from maect.train.objective import Objective
from maect.train.stage import Training
from maect.train.trainer import Trainer
from maect.train.watchdog import Watchdog

IMAGES = 1_000_000
"""Of a data set that is not there."""


class _Unsaved(Trainer):
    """Saves nothing, and goes on whatever becomes of an encoder that sees noise."""

    def save(self, wait: bool = False) -> None:
        pass

    def _collapsed(self, fault: str) -> None:
        pass


@contextmanager
def trainer_alone(
    stage: Training, objective: Objective, context: Context, device: torch.device, steps: int,
    computing: Computing = PLAIN,
) -> Iterator[Trainer]:  # fmt: skip
    """A trainer of a stage, with the batch of all ranks, around a new engine; it saves nothing."""
    objective.to(device)
    groups = stage.parameter_groups(objective)
    engine = Engine(objective, stage, groups, device, computing)
    if stage.encoder_average is not None:
        engine.start_average("encoder.")
    with TemporaryDirectory() as name:
        watchdog = Watchdog(Path(name), context)
        try:
            yield _Unsaved(
                context=context, stage=stage, encoder=objective.encoder.settings,
                objective=objective, engine=engine, device=device, step=0, steps=steps,
                images=IMAGES, saver=Saver(Path(name), context, None), metrics=None,
                watchdog=watchdog, save_seconds=float("inf"), record={}, losses=[],
                clock=DeviceTime(context, {}), accumulation=computing.accumulation,
            )  # fmt: skip
        finally:
            watchdog.close()
            engine.close()


def packed(batch: Batch, draw: Draw, pinned: bool) -> Batch:
    """The same as the loader hands it over: in one piece of memory, with what is drawn."""
    memory = Packed(layout_of([tuple(group.shape) for group in batch.images], draw), pinned)
    names = image_names(len(batch.images))
    for name, group in zip(names, batch.images, strict=True):
        memory.tensors[name].copy_(group)
    found = replace(batch, images=tuple(memory.tensors[name] for name in names), packed=memory)
    fill(found, draw)
    return found


def step_seconds(trainer: Trainer, steps: int, more: float = 0.0) -> list[float]:
    """Seconds of each step of a trainer that has done none, all on one random batch.

    A step lasts from the end of the update before it to the end of its own, on the device: with the
    copy of the batch, augmentation, both passes, the update, averages and whatever waits. There are
    at least `steps`, and as many as begin within `more` seconds.
    """
    stage, on_gpu = trainer.stage, trainer.device.type == "cuda"
    batch = random_batch(stage, trainer.encoder, stage.batch_size // trainer.context.world_size)
    if trainer.accumulation == 1:  # as in a training: a part of a batch draws for itself
        batch = packed(batch, trainer.objective.draw, on_gpu)
    marks, began = [], time.perf_counter()

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
