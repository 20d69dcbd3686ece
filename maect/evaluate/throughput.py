"""Training speed on one device, of each stage and of compared methods (paper, figure 2 and B).

As in the paper a short benchmark: random images on the device, bfloat16, the largest batch that is
a power of 2 and fits, extrapolated to the published number of epochs. Compared methods are their
encoder passes: views that learn, local views, and passes of a momentum teacher.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Input, Protocol
from maect.evaluate.job import Job
from maect.stages import load_recipe
from maect.stages.base import SelfSupervised as Stage

RECIPES = {"pretrain": "mae", "head": "head_min", "tune": "ct_min"}


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
        from maect.evaluate.compared import METHODS, Views, method_step
        from maect.evaluate.speed import Step, measure, stage_step
        from maect.models.weights import load_encoder_weights

        encoder = load_encoder_weights(job.run / "encoder.safetensors")[1]
        stages = {
            name: cast(Stage, load_recipe(recipe, self.size)) for name, recipe in RECIPES.items()
        }
        frozen = getattr(stages["tune"], "frozen_blocks", 0)
        if frozen >= encoder.depth or not encoder.class_token:
            raise UserError(
                f"throughput: recipes of size {self.size} do not fit the encoder of {job.run}; "
                "say which with settings.size=SIZE"
            )
        device = distributed.device_of(context)
        results: dict[str, dict[str, float]] = {}
        epochs: dict[str, int] = {}
        for name, stage in stages.items():

            def steps(batch: int, stage: Stage = stage) -> Step:
                return stage_step(stage, encoder, batch, device)

            results[name], epochs[name] = measure(steps, self, device), stage.epochs
            context.report({"step": len(results), "steps": len(stages) + len(METHODS)})
        for name, views in METHODS.items():

            def steps(batch: int, views: Views = views) -> Step:  # type: ignore[misc]
                return method_step(views, encoder, batch, device)

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
            "device_hours": hours | {"maect": sum(hours[name] for name in RECIPES)},
            "epochs": epochs,
            "device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "threads": None if cuda else torch.get_num_threads(),
        }
