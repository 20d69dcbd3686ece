"""Precision of matrix products: bfloat16 under autocast, if the device computes it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16"]


def mixed_precision(device: torch.device, precision: Precision) -> torch.autocast:
    """Return a context with matrix products in bfloat16, if `precision` and device say so.

    A layer casts its weights each time it is called: what is kept for a second call would lie in
    the memory of a captured pass, and gradients of both calls would be added in bfloat16.
    """
    wanted = precision == "bf16" and bfloat16_on(device.type) != "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)


@cache
def bfloat16_on(device_type: str) -> str:
    """Return "cuda" or "cpu" if it computes bfloat16 matrix products, else "float32".

    On x86 CPUs without AVX-512, which lack instructions and kernels, they would take 60 times as
    long as in float32. Warns once.
    """
    if device_type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return device_type
    log.warning("precision: this CPU computes no bfloat16; using float32")
    return "float32"
