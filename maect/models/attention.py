"""Which kernels compute attention; the parameters are those of timm's blocks."""

import warnings
from functools import cache
from typing import Any, Literal, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F


class FusedAttention(Attention):
    """timm's attention on a chosen kernel."""

    backend: Literal["sdpa", "flash_attn"] = "sdpa"

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Self-attention of tokens [b, N, D], without mask or dropout."""
        b, n = x.shape[:2]
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        flash = flash_kernel() if self.backend == "flash_attn" else None
        if flash is not None and qkv.dtype != torch.float32 and qkv.is_cuda:
            out = flash(qkv)
        else:
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            if qkv.device.type == "cpu":
                # In bfloat16 its backward pass takes six times as long as in float32.
                exact = torch.promote_types(qkv.dtype, torch.float32)
                query, key, value = query.to(exact), key.to(exact), value.to(exact)
            with torch.autocast(qkv.device.type, enabled=False):
                out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.proj(out.reshape(b, n, -1))


def use_attention(model: nn.Module, backend: Literal["sdpa", "flash_attn"]) -> None:
    """Let every attention of timm's blocks in `model` use a kernel."""
    for module in model.modules():
        if isinstance(module, Attention):
            # timm's own parameters and names stay, so its state dict does too.
            module.__class__ = FusedAttention
            cast(FusedAttention, module).backend = backend


@cache
def flash_kernel() -> Any:
    """The optional package's kernel for packed [b, N, 3, heads, d], or None, said once."""
    try:
        from flash_attn import flash_attn_qkvpacked_func  # type: ignore[import-not-found]
    except ImportError as error:
        warnings.warn(f"attention: flash_attn is not installed ({error}); using sdpa", stacklevel=2)
        return None
    return flash_attn_qkvpacked_func
