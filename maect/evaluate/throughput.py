"""Training speed on one device, of each stage and of compared methods (paper, figure 2 and B).

As in the paper a short benchmark: random images on the device, bfloat16, the largest batch that is
a power of 2 and fits, extrapolated to the published number of epochs. Compared methods are their
encoder passes: views that learn, local views, and passes of a momentum teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Input, Protocol
from maect.evaluate.job import Job
from maect.recipes import Encoder
from maect.stages import Training, load_recipe

if TYPE_CHECKING:
    from maect.train.objective import Objective

RECIPES = ("mae", "head_min", "ct_min")
"""What MAE-CT takes, one stage after the other."""


class Throughput(Protocol):
    """Training speed of each stage and of compared methods on one device (paper, B)."""

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "training speed"
    encoder_input: ClassVar[bool] = True
    test_data: ClassVar[str | None] = "no images are read"

    size: str = "large"
    """Column of the recipes that the stages are measured with."""
    batch_size: int | None = Field(default=None, gt=0)
    """Images in a step; none: the largest power of 2 that fits, on a CPU 16."""
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=10, gt=0)
    images: int = Field(default=1_281_167, gt=0)
    """Training images, for the extrapolation to hours."""

    def inputs(self) -> dict[str, Input]:
        """Nothing beside the encoder's shape."""
        return {}

    def evaluate(self, context: Context, job: Job) -> dict[str, Any]:
        """Images per second and device hours, by stage (`pretrain`, `head`, `tune`) and method.

        `samples_per_second` counts images, not views, from the median step; `fastest` and `slowest`
        are those of single steps. `device_hours` are epochs x images / speed, for what has a number
        of epochs at this size; `maect` is the sum of the three stages.

        Raises:
            UserError: the run's encoder is not of `size`, or not one step fits.
        """
        import torch

        from maect.core import distributed
        from maect.evaluate.compared import METHODS, method_step
        from maect.evaluate.speed import Step, measure, stage_step
        from maect.models.weights import load_encoder_weights

        file = job.run / "encoder.safetensors"
        encoder = load_encoder_weights(file)[1]
        stages = [load_recipe(recipe, self.size) for recipe in RECIPES]
        try:
            for stage in stages:
                stage.check_encoder(encoder)
        except ValueError as error:
            raise UserError(
                f"throughput: recipes of size {self.size} do not fit the encoder of {job.run} "
                f"({error}); say which with settings.size=SIZE"
            ) from None
        device = distributed.device_of(context)
        results: dict[str, dict[str, float]] = {}
        epochs: dict[str, int] = {}
        for stage in stages:
            steps: Callable[[int], Step]
            steps = partial(stage_step, stage, _built(stage, encoder, file), device=device)
            results[stage.name], epochs[stage.name] = measure(steps, self, device), stage.epochs
            context.report({"step": len(results), "steps": len(stages) + len(METHODS)})
        for name, views in METHODS.items():
            steps = partial(method_step, views, encoder, device=device)
            results[name] = measure(steps, self, device)
            if self.size in views.epochs:
                epochs[name] = views.epochs[self.size]
            context.report({"step": len(results), "steps": len(stages) + len(METHODS)})
        hours = {
            name: count * self.images / results[name]["samples_per_second"] / 3600
            for name, count in epochs.items()
        }
        keys = ("samples_per_second", "fastest", "slowest", "batch_size")
        metrics: dict[str, Any] = {k: {n: result[k] for n, result in results.items()} for k in keys}
        cuda = device.type == "cuda"
        return metrics | {
            "device_hours": hours | {"maect": sum(hours[stage.name] for stage in stages)},
            "epochs": epochs,
            "device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "threads": None if cuda else torch.get_num_threads(),
        }


def _built(stage: Training, encoder: Encoder, file: Path) -> Objective:
    """A stage's objective on an encoder alone: a head beside it may be of another recipe."""
    with TemporaryDirectory() as folder:
        Path(folder, file.name).symlink_to(file.absolute())
        return stage.build(encoder, 0, Path(folder))
