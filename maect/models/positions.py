"""Fixed two-dimensional sine-cosine position embedding (Vaswani et al. 2017, as MAE uses it).

timm's `build_sincos2d_pos_embed` has other bits (float32 angles) and other channels (the sines of
column and row before the cosines).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def sincos_2d(width: int, grid: int, prefix: int = 0) -> Tensor:
    """Embedding of the cells of a square grid, row by row.

    The first half of the channels encodes the column and the second half the row, each as sines
    followed by cosines of `position / 10000^(i / (width / 4))`.

    Args:
        width: channels, a multiple of 4.
        grid: cells per side.
        prefix: rows of zeros before them, for tokens that are no patches.

    Returns:
        float32 [1, prefix + grid * grid, width], computed in float64.
    """
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(grid, dtype=torch.float64)[:, None] * frequency
    line = torch.cat([angle.sin(), angle.cos()], dim=1)
    columns = line[None, :, :].expand(grid, grid, -1)
    rows = line[:, None, :].expand(grid, grid, -1)
    table = torch.cat([columns, rows], dim=2).reshape(1, grid * grid, width).float()
    return F.pad(table, (0, 0, prefix, 0))
