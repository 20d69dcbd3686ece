"""How products are computed: in bfloat16 or float32, and the kernel of attention."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Literal, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16"]
Backend = Literal["sdpa", "flash_attn"]
"""`sdpa`: the kernel that PyTorch chooses. `flash_attn`: the optional package's kernel."""


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


class FusedAttention(Attention):
    """timm's attention on a chosen kernel."""

    backend: Backend = "sdpa"

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute self-attention of tokens [b, N, D], without mask or dropout."""
        b, n = x.shape[:2]
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        if self.backend == "flash_attn" and qkv.dtype != torch.float32 and qkv.is_cuda:
            exact = torch.are_deterministic_algorithms_enabled()
            out = flash_kernel()(qkv, deterministic=exact)
        else:
            out = fused_attention(qkv)
        return self.proj(out.reshape(b, n, -1))


def fused_attention(qkv: Tensor) -> Tensor:
    """Compute attention of packed [b, N, 3, heads, d] by PyTorch's kernel: [b, N, heads, d]."""
    if qkv.device.type == "cpu":
        # In bfloat16 its backward pass takes six times as long as in float32.
        qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    with torch.autocast(qkv.device.type, enabled=False):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def use_attention(model: nn.Module, backend: Backend) -> None:
    """Set the kernel of all timm attention in `model`; sdpa if its package is missing."""
    if backend == "flash_attn" and flash_kernel() is None:
        backend = "sdpa"
    for module in model.modules():
        if isinstance(module, Attention):
            # timm's parameters and names stay, and so does its state dict.
            module.__class__ = FusedAttention
            cast(FusedAttention, module).backend = backend


@cache
def flash_kernel() -> Any:
    """Return the optional package's kernel for packed [b, N, 3, heads, d]; None with a warning."""
    try:
        from flash_attn import flash_attn_qkvpacked_func  # type: ignore[import-not-found]
    except ImportError as error:
        log.warning("attention: flash_attn is not installed (%s); using sdpa", error)
        return None
    return flash_attn_qkvpacked_func
