"""The encoder's exponential moving average, in fp32 and fed from the fp32 masters."""

from collections.abc import Sequence

import torch

from maect.train.engine import Fragment


def start_ema(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Let the average of the encoder's fragments begin at their present values."""
    encoder = [f for f in fragments if f.name.startswith("encoder.")]
    for fragment in encoder:
        fragment.ema = fragment.master.clone()
    return encoder


@torch.no_grad()
def update_ema(fragments: Sequence[Fragment], momentum: float) -> None:
    """ema <- momentum * ema + (1 - momentum) * master."""
    averages = [f.ema for f in fragments if f.ema is not None]
    if averages:
        masters = [f.master for f in fragments if f.ema is not None]
        torch._foreach_lerp_(averages, masters, 1 - momentum)
