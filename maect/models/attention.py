"""The kernels that attention is computed with."""

import logging
from functools import cache
from typing import Any, Literal, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)


class FusedAttention(Attention):
    """timm's attention on a chosen kernel."""

    backend: Literal["sdpa", "flash_attn"] = "sdpa"

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Self-attention of tokens [b, N, D], without mask or dropout."""
        b, n = x.shape[:2]
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        flash = flash_kernel() if self.backend == "flash_attn" else None
        if flash is not None and qkv.dtype != torch.float32 and qkv.is_cuda:
            out = flash(qkv, deterministic=torch.are_deterministic_algorithms_enabled())
        else:
            out = fused_attention(qkv)
        return self.proj(out.reshape(b, n, -1))


def fused_attention(qkv: Tensor) -> Tensor:
    """PyTorch's own kernel for packed [b, N, 3, heads, d]; gives [b, N, heads, d]."""
    if qkv.device.type == "cpu":
        # In bfloat16 its backward pass takes six times as long as in float32.
        qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    return attend(qkv)


def attend(qkv: Tensor) -> Tensor:
    """The same in the type that it is given."""
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    with torch.autocast(qkv.device.type, enabled=False):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def use_attention(model: nn.Module, backend: Literal["sdpa", "flash_attn"]) -> None:
    """Let every attention of timm's blocks in `model` use a kernel."""
    for module in model.modules():
        if isinstance(module, Attention):
            # timm's own parameters and names stay, so its state dict does too.
            module.__class__ = FusedAttention
            cast(FusedAttention, module).backend = backend


@cache
def flash_kernel() -> Any:
    """The optional package's kernel for packed [b, N, 3, heads, d]; None, with one warning."""
    try:
        from flash_attn import flash_attn_qkvpacked_func  # type: ignore[import-not-found]
    except ImportError as error:
        log.warning("attention: flash_attn is not installed (%s); using sdpa", error)
        return None
    return flash_attn_qkvpacked_func
