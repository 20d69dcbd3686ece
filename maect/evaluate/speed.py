"""Speed of a training step on one device."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from maect.core.errors import UserError
from maect.data.loader import Batch
from maect.stages import Training
from maect.train.objective import Objective

if TYPE_CHECKING:
    from maect.evaluate.throughput import Throughput

CPU_BATCH = 16
SMALLEST, LARGEST = 8, 1024

Step = Callable[[], object]


def measure(
    steps: Callable[[int], Step], settings: "Throughput", device: torch.device
) -> dict[str, float]:
    """Speed of a training step in images per second: median, fastest and slowest of the repeats.

    Args:
        steps: gives the step for a batch of so many images.
        settings: batch size, warm-up and repeats.
        device: what to wait for.
    """
    batch = settings.batch_size or largest_batch(steps, device)
    step = steps(batch)
    seconds = []
    for number in range(settings.warmup + settings.repeats):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= settings.warmup:
            seconds.append(time.perf_counter() - start)
    return {
        "samples_per_second": batch / statistics.median(seconds),
        "fastest": batch / min(seconds),
        "slowest": batch / max(seconds),
        "batch_size": batch,
    }


def largest_batch(steps: Callable[[int], Step], device: torch.device) -> int:
    """The largest power of 2 (8 to 1024) of which a step fits into the device's memory.

    Raises:
        UserError: not even the smallest does.
    """
    if device.type != "cuda":
        return CPU_BATCH
    fitting, size = 0, SMALLEST
    while size <= LARGEST and _fits(steps, size):
        fitting, size = size, 2 * size
    if not fitting:
        raise UserError(f"throughput: {SMALLEST} images do not fit into the device's memory")
    return fitting


def _fits(steps: Callable[[int], Step], size: int) -> bool:
    try:
        step = steps(size)
        step()  # a second one has the optimizer's moments
        step()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def stage_step(stage: Training, objective: Objective, batch: int, device: torch.device) -> Step:
    """One update of a stage on the same random views, which are on the device before it."""
    objective.to(device)
    averages: list[Tensor] = []
    if stage.encoder_average is not None:
        averages = [p.detach().clone() for p in _trained(objective.encoder)]
    fused = device.type == "cuda"
    groups = stage.parameter_groups(objective)
    for group in groups:
        group["lr"] = group["peak_lr"]
    optimizer = torch.optim.AdamW(groups, fused=fused)
    side, ids = objective.encoder.settings.image_size, np.arange(batch)
    shape = (len(stage.view_settings()), batch, 3, side, side)
    images = torch.randint(256, shape, dtype=torch.uint8)
    inputs = objective.prepare(Batch(0, ids, 0 * ids, 0 * ids, images), device)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = objective(inputs)
        loss.backward()
        optimizer.step()
        if stage.encoder_average is not None:
            trained = [p.detach() for p in _trained(objective.encoder)]
            torch._foreach_lerp_(averages, trained, 1 - stage.encoder_average)
        objective.after_update(lambda part: nullcontext())

    return step


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
