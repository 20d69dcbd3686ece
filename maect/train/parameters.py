"""Which parameter learns how fast: groups, layer-wise decay and the schedule."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from maect.stages.base import SelfSupervised as Stage
from maect.stages.head import Head
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune


def layer_scale(name: str, depth: int, decay: float) -> float:
    """Factor on the learning rate of an encoder parameter (Clark et al. 2020, as MAE indexes it).

    The final norm has 1, block j of `depth` has decay^(depth - j), what lies before the blocks
    decay^(depth + 1).

    Args:
        name: as in timm's state dict.
        depth: number of blocks, frozen ones included.
        decay: factor from layer to layer.
    """
    if name.startswith("norm."):
        return 1.0
    if name.startswith("blocks."):
        return decay ** (depth - int(name.split(".")[1]))
    return decay ** (depth + 1)


def parameter_groups(objective: nn.Module, stage: Stage) -> list[dict[str, Any]]:
    """Trainable parameters grouped for AdamW.

    Biases and everything of one dimension (norms) are not decayed; [CLS] and mask token are.

    Returns:
        Groups with `params`, `names`, `lr` (0 until the first step), `peak_lr`, `weight_decay`.
    """
    encoder_lr, decay = 0.0, 1.0
    encoder_weight_decay = 0.0
    head = stage.head if isinstance(stage, Pretrain | Head | Tune) else None
    if isinstance(stage, Pretrain | Tune):
        encoder_lr, encoder_weight_decay = stage.scaled_lr(stage.base_lr), stage.weight_decay
    if isinstance(stage, Tune):
        decay = stage.layer_decay
    depth = len(objective.encoder.blocks)  # type: ignore[union-attr, arg-type]

    def rates(name: str) -> tuple[float, float]:
        part, _, inner = name.partition(".")
        if part == "head":
            assert head is not None
            return stage.scaled_lr(head.head_lr), head.head_weight_decay
        scale = layer_scale(inner, depth, decay) if part == "encoder" else 1.0
        return encoder_lr * scale, encoder_weight_decay

    return grouped(objective, rates)


def grouped(
    objective: nn.Module, rates: Callable[[str], tuple[float, float]]
) -> list[dict[str, Any]]:
    """Trainable parameters by peak learning rate and weight decay, which `rates` gives by name."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in objective.named_parameters():
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


def schedule(step: int, steps: int, warmup: float) -> float:
    """Fraction of the peak learning rate in update `step` (from 0) of `steps`.

    Linear warm-up between 0 and the peak, both excluded, then a cosine from the peak towards 0,
    which it does not reach.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def total_steps(stage: Stage, samples: int) -> int:
    """Updates of a stage; batches straddle epochs, so nothing is dropped but the last rest."""
    return stage.epochs * samples // stage.batch_size


def warmup_steps(stage: Stage, steps: int) -> int:
    """Updates of the warm-up."""
    return round(stage.warmup_fraction * steps)
