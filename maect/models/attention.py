"""Choice of the kernels that compute attention."""

import logging
from functools import cache
from typing import Any, Literal, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)

Backend = Literal["sdpa", "packed", "flash_attn"]
"""`sdpa`: the kernel that PyTorch chooses. `packed`: its memory-efficient kernel with one gradient,
for short sequences. `flash_attn`: the optional package's kernel."""
SHORT = 64
"""Tokens, at most, for `packed`: it was faster with 50, cuDNN's kernel with 197 (docs/gpu.md)."""


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
        elif self.backend == "packed" and qkv.is_cuda and n <= SHORT:
            out = packed_attention(qkv)
        else:
            out = fused_attention(qkv)
        return self.proj(out.reshape(b, n, -1))


def fused_attention(qkv: Tensor) -> Tensor:
    """Compute attention of packed [b, N, 3, heads, d] by PyTorch's kernel: [b, N, heads, d]."""
    if qkv.device.type == "cpu":
        # In bfloat16 its backward pass takes six times as long as in float32.
        qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    return attend(qkv)


def attend(qkv: Tensor) -> Tensor:
    """Compute attention of packed [b, N, 3, heads, d] in the type that it is given."""
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    with torch.autocast(qkv.device.type, enabled=False):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def packed_attention(qkv: Tensor) -> Tensor:
    """Compute attention of packed [b, N, 3, heads, d] with one packed gradient.

    Only PyTorch's memory-efficient kernel writes one gradient for queries, keys and values. Those
    of flash attention would be stacked by another kernel.
    """
    return cast(Tensor, _Packed.apply(qkv))


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        given = (*qkv.unbind(2), None, None, None, None, None, 0.0, 0, True)
        out, *rest = torch.ops.aten._efficient_attention_forward(*given)
        ctx.save_for_backward(qkv, out, *rest[:3])
        ctx.lengths = rest[3:]
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        qkv, out, sums, *state = ctx.saved_tensors
        query, key, value = qkv.unbind(2)
        first, *_ = torch.ops.aten._efficient_attention_backward(
            gradients[0].contiguous(), query, key, value, None, out, None, None, *ctx.lengths, sums,
            0.0, *state, 0, False, shared_storage_dqdkdv=True,
        )  # fmt: skip
        if first.stride() != query.stride():
            raise RuntimeError("attention: packed: this PyTorch does not pack the gradients")
        return cast(Tensor, first.as_strided(qkv.shape, qkv.stride(), 0))


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
