"""The encoder of CAPI (Darcet et al. 2025), which is no model of timm.

Written after facebookresearch/capi, `model.py`, with its names except those of the patches. It has
rotary positions with stored frequencies, registers on the image's edge in place of [CLS], RMSNorm
and no biases in the blocks. The final norm has no weights. The predictor is left out.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from maect.models.vit import initialize
from maect.recipes import Encoder

EPS = 1e-5


class Rope(nn.Module):
    """Rotary positions: `freqs` [2, d] maps coordinates to angles of channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.zeros(2, width))

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Rotate channels of x [b, heads, N, d] by the angles of coordinates [N, 2]."""
        # Not a matrix product, which autocast would round.
        angles = coordinates[:, :1] * self.freqs[0] + coordinates[:, 1:] * self.freqs[1]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class Attention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.rope = Rope(width // heads)

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Compute attention of tokens [b, N, D] at coordinates [N, 2]."""
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rope(q, coordinates), self.rope(k, coordinates)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Residual branch: x + fn(norm(x))."""

    def __init__(self, width: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.fn = fn

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Add the branch to tokens [b, N, D]."""
        return x + self.fn(self.norm(x), *more)


class Block(nn.Module):
    """A transformer block: attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.residual1 = Residual(width, Attention(width, heads))
        self.residual2 = Residual(width, Mlp(width, 4 * width, bias=False))

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Compute the block on tokens [b, N, D] at coordinates [N, 2]."""
        return self.residual2(self.residual1(x, coordinates))


class Capi(nn.Module):
    """CAPI's encoder, with the interface that `TimmEncoder` needs."""

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        width, patch = settings.width, settings.patch_size
        embed = nn.Conv2d(settings.pixels.channels, width, patch, patch)
        self.patch_embed = nn.Sequential(OrderedDict(proj=embed))
        self.registers = nn.Parameter(torch.zeros(1, settings.registers, width))
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(width, eps=EPS, elementwise_affine=False)
        initialize(self)

    def forward_intermediates(
        self, images: Tensor, numbers: Sequence[int], **_: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """Return raw patch tokens [b, L, D] and registers [b, R, D] of blocks, by number.

        Args:
            images: [b, C, H, W], normalized.
            numbers: of the blocks, rising from 0.
        """
        x = self.patch_embed(images)
        rows, columns = x.shape[2:]
        coordinates = self.coordinates(rows, columns, x)
        x = x.flatten(2).transpose(1, 2)
        registers = self.registers.expand(len(x), -1, -1).to(x.dtype)
        count = registers.shape[1]
        x = torch.cat([registers, x], dim=1)
        found = []
        for number, block in enumerate(self.blocks):
            x = block(x, coordinates)
            if number in numbers:
                found.append((x[:, count:], x[:, :count]))
        return found

    def coordinates(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return row and column of each token, [R + rows * columns, 2] from 0 to 1.

        Registers lie on the edge, equally many on each side.
        """
        line = partial(torch.linspace, 0, device=like.device, dtype=self.registers.dtype)
        patches = torch.cartesian_prod(line(1, rows), line(1, columns))
        side = self.registers.shape[1] // 4
        along = line(side - 1, side) / side
        start, end = torch.zeros_like(along), torch.ones_like(along)
        edge = [(along, start), (end, along), (1 - along, end), (start, 1 - along)]
        return torch.cat([*(torch.stack(pair, dim=1) for pair in edge), patches])
