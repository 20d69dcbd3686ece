"""Choice of the kernels that compute attention."""

import logging
from functools import cache
from typing import Any, Literal, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)

Backend = Literal["sdpa", "flash_attn"]
"""`sdpa`: the kernel that PyTorch chooses. `flash_attn`: the optional package's kernel."""


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
