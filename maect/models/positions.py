"""Fixed two-dimensional sine-cosine position embedding (Vaswani et al. 2017, as MAE uses it)."""

import torch
from torch import Tensor


def sincos_2d(width: int, grid: int) -> Tensor:
    """Embedding of the cells of a square grid, row by row.

    The first half of the channels encodes the column and the second half the row, each as sines
    followed by cosines of `position / 10000^(i / (width / 4))`.

    Args:
        width: channels, a multiple of 4.
        grid: cells per side.

    Returns:
        float32 [grid * grid, width], computed in float64.
    """
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(grid, dtype=torch.float64)[:, None] * frequency
    line = torch.cat([angle.sin(), angle.cos()], dim=1)
    columns = line[None, :, :].expand(grid, grid, -1)
    rows = line[:, None, :].expand(grid, grid, -1)
    return torch.cat([columns, rows], dim=2).reshape(grid * grid, width).float()


def with_cls(positions: Tensor) -> Tensor:
    """Prepend the [CLS] token's row, which is zero: [L, D] to [1, 1 + L, D]."""
    return torch.cat([torch.zeros_like(positions[:1]), positions])[None]
