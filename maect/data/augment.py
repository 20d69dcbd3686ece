"""Random changes of colour and sharpness, in batches on the images' device.

Order and strengths are those of the authors' code (crop, flip, jitter, blur, grey, solarize;
BYOL's strengths, brightness .4, contrast .4, saturation .2, hue .1). Each sample's parameters come
from the counter-based generator, so they depend on (seed, epoch, sample id, view) alone.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from maect.data import random
from maect.recipes import View

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
SIGMA = (0.1, 2.0)
SOLARIZE_FROM = 128 / 255
_LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601, as Pillow and torchvision


def normalize(images: Tensor) -> Tensor:
    """ImageNet's mean and standard deviation.

    Args:
        images: uint8 [b, 3, S, S], or float in [0, 1].

    Returns:
        float32 [b, 3, S, S].
    """
    mean = torch.tensor(MEAN, device=images.device).view(3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(3, 1, 1)
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return (images - mean) / std


def augment(
    images: Tensor, view: View, view_number: int, seed: int, epochs: ArrayLike, ids: ArrayLike
) -> Tensor:
    """Flip, jitter, blur, grey and solarize cropped images, then normalize.

    Args:
        images: uint8 [b, 3, S, S], on any device.
        view: probabilities of each change.
        view_number: which view of the image this is; views draw different numbers.
        seed: the run's seed.
        epochs: epoch of each sample, [b].
        ids: stable sample ids, [b].

    Returns:
        float32 [b, 3, S, S], normalized, on the device of `images`.
    """
    flipped = random.uniform(seed, epochs, ids, view_number, random.FLIP, 1)[:, 0] < view.flip
    x = images.float() / 255
    x = _where(x, flipped, lambda y, _: y.flip(3))
    if view.jitter or view.blur or view.gray or view.solarize:
        u = random.uniform(seed, epochs, ids, view_number, random.COLOR, 13)
        x = jitter(x, u[:, 0] < view.jitter, u[:, 1:5], u[:, 5:9])
        sigma = SIGMA[0] + (SIGMA[1] - SIGMA[0]) * u[:, 10]
        x = _where(x, u[:, 9] < view.blur, lambda y, rows: blur(y, sigma[rows]))
        x = _where(x, u[:, 11] < view.gray, lambda y, _: luma(y).expand_as(y))
        x = _where(x, u[:, 12] < view.solarize, lambda y, _: solarize(y))
    return normalize(x)


def _where(x: Tensor, chosen: NDArray[np.bool_], change) -> Tensor:  # type: ignore[no-untyped-def]
    """Apply `change(images, rows)` to the chosen rows; they are known here, so nothing waits."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return x
    if len(rows) == len(x):
        return change(x, rows)
    index = torch.from_numpy(rows).to(x.device, non_blocking=True)
    return x.index_copy(0, index, change(x.index_select(0, index), rows))


def jitter(
    x: Tensor, chosen: NDArray[np.bool_], strengths: NDArray[np.float64], order: NDArray[np.float64]
) -> Tensor:
    """Brightness, contrast, saturation and hue in random order (torchvision's ColorJitter).

    Args:
        x: float [b, 3, S, S] in [0, 1].
        chosen: which samples, [b].
        strengths: uniform numbers [b, 4], one per change.
        order: uniform numbers [b, 4]; their ranks are the order of the changes.
    """
    width = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE])
    factors = (2 * strengths - 1) * width + np.array([1.0, 1.0, 1.0, 0.0])
    ranks = np.argsort(np.argsort(order, axis=1, kind="stable"), axis=1, kind="stable")
    for step in range(4):
        for number, change in enumerate((brightness, contrast, saturation, hue)):
            now = chosen & (ranks[:, number] == step)

            def apply(y: Tensor, rows: NDArray[np.int64], number=number, change=change) -> Tensor:  # type: ignore[no-untyped-def]
                return change(y, _column(factors[rows, number], y))

            x = _where(x, now, apply)
    return x


def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
    column = torch.from_numpy(values.astype(np.float32)).view(-1, 1, 1, 1)
    return column.to(like.device, non_blocking=True)


def luma(x: Tensor) -> Tensor:
    """Grey value, [b, 1, S, S]."""
    return _LUMA[0] * x[:, 0:1] + _LUMA[1] * x[:, 1:2] + _LUMA[2] * x[:, 2:3]


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (other + factor * (x - other)).clamp_(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Scale towards or away from black; `factor` is [b, 1, 1, 1] here and below."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale towards or away from the image's mean grey value."""
    return _blend(x, luma(x).mean((2, 3), keepdim=True), factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Scale towards or away from each pixel's grey value."""
    return _blend(x, luma(x), factor)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` of the whole circle."""
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = high - low
    divisor = torch.where(chroma == 0, 1, chroma)
    r, g, b = x.split(1, 1)
    sector = torch.where(high == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor)
    sector = torch.where(high == r, (g - b) / divisor, sector)
    angle = (sector / 6 + shift).remainder(1) * 6
    # Channel n of an HSV colour: V - C max(0, min(k, 4 - k, 1)), k = (n + H/60) mod 6.
    offsets = torch.tensor([5.0, 3.0, 1.0], device=x.device).view(1, 3, 1, 1)
    k = (offsets + angle).remainder(6)
    return high - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def blur(x: Tensor, sigma: NDArray[np.float64]) -> Tensor:
    """Gaussian blur with each sample's own standard deviation in pixels, edges repeated.

    A blur along one side is a product with a banded matrix, which batches well.
    """
    rows = _blur_matrix(sigma, x.shape[2], x)
    columns = rows if x.shape[2] == x.shape[3] else _blur_matrix(sigma, x.shape[3], x)
    return (rows[:, None] @ x @ columns.transpose(1, 2)[:, None]).clamp_(0, 1)


def _blur_matrix(sigma: NDArray[np.float64], size: int, like: Tensor) -> Tensor:
    """[b, size, size]: row i holds the weights of output pixel i."""
    # Beyond four standard deviations nothing is left that eight bits could show.
    reach = int(np.ceil(4 * SIGMA[1]))
    taps = torch.arange(-reach, reach + 1, device=like.device, dtype=torch.float32)
    width = torch.from_numpy(sigma.astype(np.float32)).to(like.device).view(-1, 1)
    weights = torch.softmax(-(taps**2) / (2 * width**2), 1)
    target = torch.arange(size, device=like.device)
    source = (target[:, None] + taps.long()).clamp_(0, size - 1)
    matrix = torch.zeros(len(sigma), size, size, device=like.device)
    return matrix.scatter_add_(
        2, source.expand(len(sigma), -1, -1), weights[:, None].expand(-1, size, -1)
    )


def solarize(x: Tensor) -> Tensor:
    """Invert what is at or above 128 of 255."""
    return torch.where(x >= SOLARIZE_FROM, 1 - x, x)
