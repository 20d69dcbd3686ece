"""Which part of an image goes where: random crops for training, the centre for evaluation.

A geometry is eight int32: the source box (x, y, width, height) in pixels of the image, the size
(width, height) to which that box is resized, and the corner (left, top) of the output window in
the resized box.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maect.data import random

_TRIES = 10
_LOG_RATIO = 0.28768207245178093  # ln(4/3): aspect ratios are drawn from 3/4 to 4/3
_RATIO = (3 / 4, 4 / 3)


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e^x for |x| < 0.3 to the last bits, from sums and products only.

    NumPy's own differs in the last bit between CPUs, which could move a crop by one pixel.
    """
    result = np.ones_like(x)
    for k in range(13, 0, -1):
        result = 1.0 + result * x / k
    return result


def random_crops(
    width: NDArray[np.int64],
    height: NDArray[np.int64],
    scale: tuple[float, float],
    size: int,
    *,
    seed: int,
    epochs: ArrayLike,
    ids: ArrayLike,
    view: int,
) -> NDArray[np.int32]:
    """Geometries [b, 8] of random resized crops (Inception crops, as torchvision draws them).

    Area uniform in `scale` of the image's, log aspect ratio uniform in ln(3/4)..ln(4/3), ten
    tries, then the largest central crop with an allowed aspect ratio.
    """
    u = random.uniform(seed, epochs, ids, view, random.CROP, 2 * _TRIES + 2)
    area = (width * height).astype(np.float64)[:, None]
    target = area * (scale[0] + (scale[1] - scale[0]) * u[:, 0 : 2 * _TRIES : 2])
    ratio = _exp(_LOG_RATIO * (2.0 * u[:, 1 : 2 * _TRIES : 2] - 1.0))
    w = np.rint(np.sqrt(target * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(target / ratio)).astype(np.int64)
    fits = (w > 0) & (h > 0) & (w <= width[:, None]) & (h <= height[:, None])
    found, first = fits.any(1), fits.argmax(1)
    rows = np.arange(len(width))
    w, h = w[rows, first], h[rows, first]

    shape = width / height
    narrow, wide = shape < _RATIO[0], shape > _RATIO[1]
    central_w = np.where(wide, np.rint(height * _RATIO[1]).astype(np.int64), width)
    central_h = np.where(narrow, np.rint(width / _RATIO[0]).astype(np.int64), height)
    w = np.maximum(np.where(found, w, central_w), 1)
    h = np.maximum(np.where(found, h, central_h), 1)
    x = np.where(found, np.floor(u[:, -2] * (width - w + 1)), (width - w) // 2)
    y = np.where(found, np.floor(u[:, -1] * (height - h + 1)), (height - h) // 2)
    zero = np.zeros_like(w)
    whole = np.full_like(w, size)
    return np.stack([x, y, w, h, whole, whole, zero, zero], 1).astype(np.int32)


def center_crops(
    width: NDArray[np.int64], height: NDArray[np.int64], resize: int, size: int
) -> NDArray[np.int32]:
    """Geometries [b, 8]: the shorter side resized to `resize`, then the central `size` square."""
    wide = width > height
    short = np.minimum(width, height)
    long = resize * np.maximum(width, height) // short
    full_w = np.where(wide, long, resize)
    full_h = np.where(wide, resize, long)
    left = np.rint((full_w - size) / 2.0)
    top = np.rint((full_h - size) / 2.0)
    zero = np.zeros_like(width)
    return np.stack([zero, zero, width, height, full_w, full_h, left, top], 1).astype(np.int32)
