"""The training loop with fine-tuning's batches and schedule, as one part of a longer job."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import Store

from maect.core.context import Context
from maect.data.draws import drop_path_factors
from maect.data.loader import Batch
from maect.data.transforms import apply_mix, augment, draw_mix, erase
from maect.evaluate.fine_tune_model import Examples, drop_rates
from maect.evaluate.fine_tune_settings import FineTune
from maect.stages.base import SelfSupervised as Stage
from maect.train.loop import Loop
from maect.train.parameters import warmup_steps


@dataclass
class Part:
    """The context of one of several trainings: its steps count on from those before it."""

    whole: Context
    before: int
    total: int
    rank: int = field(init=False)
    local_rank: int = field(init=False)
    world_size: int = field(init=False)
    local_world_size: int = field(init=False)
    cpus: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.local_rank = self.whole.rank, self.whole.local_rank
        self.local_world_size = self.whole.local_world_size
        self.world_size, self.cpus = self.whole.world_size, self.whole.cpus

    def stop_requested(self) -> bool:
        """Whether this rank was told to save and return."""
        return self.whole.stop_requested()

    def report(self, progress: dict[str, Any]) -> None:
        """Show how far the whole job is."""
        step = self.before + progress["step"]
        self.whole.report({**progress, "step": step, "steps": self.total})

    def saved(self, step: int) -> None:
        """Tell that the state of this step is complete on disk."""
        self.whole.saved(self.before + step)

    def store(self, timeout: timedelta) -> Store:
        """The store in which the ranks' process group meets."""
        return self.whole.store(timeout)

    def fail(self, error: BaseException) -> None:
        """End this rank at once with an error."""
        self.whole.fail(error)


@dataclass
class FineTuneLoop(Loop):
    """`Loop` for an objective that takes `Examples`.

    Attributes:
        settings: the recipe.
        losses: sum and number of the batch losses of each epoch so far; saved with the state.
    """

    settings: FineTune
    losses: list[tuple[float, int]]

    def rate(self) -> float:
        """Fraction of the peak rates: linear warm-up, then cosine to `min_lr`."""
        rate = super().rate()
        if self.step < warmup_steps(self.stage, self.steps):
            return rate
        lowest = self.settings.min_lr / self.stage.scaled_lr(self.settings.base_lr)
        return lowest + (1 - lowest) * rate

    def _prepare(self, batch: Batch, number: int, pieces: int) -> Examples:
        share = len(batch.ids) // pieces
        rows = slice(number * share, (number + 1) * share)
        ids, epochs = batch.ids[rows], batch.epochs[rows]
        raw = batch.images[0, rows].to(self.device, non_blocking=True)
        images = augment(raw, self._views[0], 0, self.seed, epochs, ids)
        erase(images, self.settings.random_erasing, self.seed, epochs, ids)
        settings, size = self.settings, self.encoder.image_size
        mix = draw_mix(settings.mixup, settings.cutmix, size, self.seed, batch.step)
        kept = None
        if self.settings.drop_path:
            rates = np.array(drop_rates(self.settings, self.encoder.depth))
            kept = drop_path_factors(rates, self.seed, epochs, ids).to(self.device)
        labels = torch.from_numpy(batch.labels[rows]).to(self.device)
        return Examples(apply_mix(images, mix), labels, mix.share, kept)

    def _log(self, values: dict[str, float], norm: float) -> None:
        super()._log(values, norm)
        epoch = (self.step - 1) * self.stage.batch_size // self.samples
        losses = self.losses + [(0.0, 0)] * (epoch + 1 - len(self.losses))
        total, count = losses[epoch]
        losses[epoch] = (total + values["loss"], count + 1)
        # Replaced, not changed: a state may be on its way to the disk.
        self.losses, self.record = losses, {**self.record, "losses": losses}


def stage_of(settings: FineTune) -> Stage:
    """What the training engine needs to know of a recipe."""
    return Stage(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        augmentation="min",
        crop_scale=settings.crop_scale,
        flip=settings.flip,
        beta1=settings.beta1,
        beta2=settings.beta2,
        warmup_fraction=settings.warmup_epochs / settings.epochs,
        precision=settings.precision,
        zero_stage=settings.zero_stage,
        accumulation=settings.accumulation,
        compile=settings.compile,
        activation_checkpointing=settings.activation_checkpointing,
        views=1,
    )
