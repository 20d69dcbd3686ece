"""Learning rates of parameters: groups, layer-wise decay and the schedule."""

import math
from collections.abc import Callable
from typing import NotRequired, TypedDict

from torch import Tensor, nn


class ParameterGroup(TypedDict):
    """Parameters with one learning rate and weight decay, as AdamW takes them."""

    params: list[Tensor]
    names: NotRequired[list[str]]
    lr: NotRequired[float]
    """0 until the first step."""
    peak_lr: float
    weight_decay: float


def layer_scale(name: str, depth: int, decay: float) -> float:
    """Factor on the learning rate of an encoder parameter (Clark et al. 2020, as MAE indexes it).

    The final norm has 1, block j of `depth` has decay^(depth - j), what lies before the blocks
    decay^(depth + 1). Names are those of timm's state dict.
    """
    if name.startswith("norm."):
        return 1.0
    if name.startswith("blocks."):
        return decay ** (depth - int(name.split(".")[1]))
    return decay ** (depth + 1)


def grouped(module: nn.Module, rates: Callable[[str], tuple[float, float]]) -> list[ParameterGroup]:
    """Group trainable parameters for AdamW by learning rate and weight decay.

    Biases and everything of one dimension (norms) are not decayed; [CLS] and mask token are.
    `rates` gives peak learning rate and weight decay of a parameter by its name.
    """
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        peak, weight_decay = rates(name)
        if parameter.ndim <= 1 or name.endswith(".bias"):
            weight_decay = 0.0
        group = groups.setdefault(
            (peak, weight_decay),
            {"params": [], "names": [], "lr": 0.0, "peak_lr": peak, "weight_decay": weight_decay},
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def schedule(step: int, steps: int, warmup: float, lowest: float = 0.0) -> float:
    """Fraction of the peak learning rate in update `step` (from 0) of `steps`.

    Linear warm-up of `warmup` updates between 0 and the peak, both excluded, then a cosine from
    the peak towards the fraction `lowest`, which it does not reach.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    return lowest + (1 - lowest) * cosine
