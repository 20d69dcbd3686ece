"""What a run makes of its device: memory and model FLOP utilisation."""

import psutil
import torch

from maect.recipes import Encoder
from maect.recipes.flops import peak_flops
from maect.stages.base import SelfSupervised as Stage

GIB = 2**30


def usage(
    stage: Stage, encoder: Encoder, images_per_second: float, world_size: int, device: torch.device
) -> dict[str, float]:
    """Use of this rank's device at a speed that all ranks reach together.

    Returns:
        `memory_gib`: the most that was allocated on a GPU, or this process's resident memory;
        `tflops`: model operations a device, 10^12 a second; `utilization`: the same as a fraction
        of the device's dense bfloat16 rate, where that is known and the precision is bfloat16.
    """
    rate = stage.flops_per_image(encoder) * images_per_second / world_size
    found = {"memory_gib": _memory(device) / GIB, "tflops": rate / 1e12}
    if device.type == "cuda" and stage.precision == "bf16":
        peak = peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            found["utilization"] = rate / peak
    return found


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
