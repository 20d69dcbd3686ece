"""All that happens to an image: cropping, colours, RandAugment, erasing, mixing.

What an image meets depends on (seed, epoch, sample id, view) alone, what a batch meets on
(seed, step): both come from the counter-based generator, so ranks, threads and restarts change
nothing. Crops and RandAugment are done by the loader's threads, everything else in batches on the
images' device.

A geometry says which part of an image goes where. It is eight int32: the source box (x, y, width,
height) in pixels of the image, the size (width, height) to which that box is resized, and the
corner (left, top) of the output window in the resized box.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from maect.data import random
from maect.recipes import View

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, of values from 0 to 1
STD = (0.229, 0.224, 0.225)

# --- Cropping -------------------------------------------------------------------------------------

_CROP_TRIES = 10
_CROP_RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = 0.28768207245178093  # ln(4/3): log aspect ratios are uniform from -ln(4/3) on


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
    u = random.uniform(seed, epochs, ids, view, random.CROP, 2 * _CROP_TRIES + 2)
    area = (width * height).astype(np.float64)[:, None]
    target = area * (scale[0] + (scale[1] - scale[0]) * u[:, 0 : 2 * _CROP_TRIES : 2])
    ratio = _exp(_LOG_RATIO * (2.0 * u[:, 1 : 2 * _CROP_TRIES : 2] - 1.0))
    w = np.rint(np.sqrt(target * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(target / ratio)).astype(np.int64)
    fits = (w > 0) & (h > 0) & (w <= width[:, None]) & (h <= height[:, None])
    fitting, first = fits.any(1), fits.argmax(1)
    rows = np.arange(len(width))
    w, h = w[rows, first], h[rows, first]

    shape = width / height
    narrow, wide = shape < _CROP_RATIO[0], shape > _CROP_RATIO[1]
    central_w = np.where(wide, np.rint(height * _CROP_RATIO[1]).astype(np.int64), width)
    central_h = np.where(narrow, np.rint(width / _CROP_RATIO[0]).astype(np.int64), height)
    w = np.maximum(np.where(fitting, w, central_w), 1)
    h = np.maximum(np.where(fitting, h, central_h), 1)
    x = np.where(fitting, np.floor(u[:, -2] * (width - w + 1)), (width - w) // 2)
    y = np.where(fitting, np.floor(u[:, -1] * (height - h + 1)), (height - h) // 2)
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


# --- Normalization and colours --------------------------------------------------------------------

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

    Order and strengths are those of the authors' code (BYOL's strengths).

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


# --- RandAugment, erasing and mixing: timm's, but for the draws -----------------------------------

Change = Callable[[NDArray[np.uint8], int, int], None]
"""Changes a sample's views, uint8 [views, 3, S, S], in place, given its epoch and its id."""

# timm's `rand-m9-mstd0.5-inc1`: each operation at even odds, strengths normal around 9 of 10.
_PROBABILITY, _STRENGTH_STD, _STRONGEST = 0.5, 0.5, 10.0
_FILL = tuple(round(255 * mean) for mean in MEAN)
# Argument of each operation for a strength from 0 to 1 and a sign.
ARGUMENTS: dict[str, Callable[[float, int], tuple[float, ...]]] = {
    "AutoContrast": lambda strength, sign: (),
    "Equalize": lambda strength, sign: (),
    "Invert": lambda strength, sign: (),
    "Rotate": lambda strength, sign: (30 * strength * sign,),
    "PosterizeIncreasing": lambda strength, sign: (4 - int(4 * strength),),
    "SolarizeIncreasing": lambda strength, sign: (256 - int(256 * strength),),
    "SolarizeAdd": lambda strength, sign: (int(110 * strength),),
    "ColorIncreasing": lambda strength, sign: (max(0.1, 1 + 0.9 * strength * sign),),
    "ContrastIncreasing": lambda strength, sign: (max(0.1, 1 + 0.9 * strength * sign),),
    "BrightnessIncreasing": lambda strength, sign: (max(0.1, 1 + 0.9 * strength * sign),),
    "SharpnessIncreasing": lambda strength, sign: (max(0.1, 1 + 0.9 * strength * sign),),
    "ShearX": lambda strength, sign: (0.3 * strength * sign,),
    "ShearY": lambda strength, sign: (0.3 * strength * sign,),
    "TranslateXRel": lambda strength, sign: (0.45 * strength * sign,),
    "TranslateYRel": lambda strength, sign: (0.45 * strength * sign,),
}
OPERATIONS = tuple(ARGUMENTS)

_ERASED_AREA, _ERASED_RATIO, _ERASE_TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def randaugment(layers: int, magnitude: float, seed: int) -> Change | None:
    """RandAugment (Cubuk et al. 2020) of each decoded image's first view, for the loader.

    Args:
        layers: operations an image; with 0 there is nothing to do: None.
        magnitude: their mean strength, 0 to 10.
        seed: the training's.
    """
    return partial(_randaugment, layers, magnitude, seed) if layers else None


def _randaugment(
    layers: int, magnitude: float, seed: int, views: NDArray[np.uint8], epoch: int, sample: int
) -> None:
    u = random.uniform(seed, epoch, sample, 0, random.RAND_AUGMENT, 4 * layers)
    for operation, odds, strength, sign in u.reshape(layers, 4):
        if odds < _PROBABILITY:
            drawn = NormalDist(magnitude, _STRENGTH_STD).inv_cdf(max(strength, 2.0**-53))
            name = OPERATIONS[int(operation * len(OPERATIONS))]
            part = min(max(drawn, 0.0), _STRONGEST) / _STRONGEST
            apply_operation(views[0], name, part, 1 if sign < 0.5 else -1)


def apply_operation(image: NDArray[np.uint8], name: str, strength: float, sign: int) -> None:
    """One of timm's operations, in place on uint8 [3, S, S]; bicubic, filled with the mean."""
    # Imported here: timm takes a second that only fine-tuning has to wait for.
    from timm.data import auto_augment

    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    operation: Any = auto_augment.NAME_TO_OP[name]
    changed = operation(
        picture,
        *ARGUMENTS[name](strength, sign),
        fillcolor=_FILL,
        resample=Image.Resampling.BICUBIC,
    )
    image[:] = np.asarray(changed).transpose(2, 0, 1)


def erase(
    images: Tensor, probability: float, seed: int, epochs: ArrayLike, ids: ArrayLike
) -> Tensor:
    """Fill a random rectangle of some images with normal noise, in place (Zhong et al. 2020).

    Args:
        images: normalized, float [b, 3, S, S].
        probability: of an image to be changed.
        seed: the training's.
        epochs: epoch of each sample, [b].
        ids: stable sample ids, [b].
    """
    if not probability:
        return images
    u = random.uniform(seed, epochs, ids, 0, random.ERASE, 4 + 2 * _ERASE_TRIES)
    for row in np.flatnonzero(u[:, 0] < probability):
        box = rectangle(u[row, 1:-1], images.shape[2], images.shape[3])
        if box is not None:
            top, left, height, width = box
            generator = torch.Generator().manual_seed(int(u[row, -1] * 2.0**53))
            # On the CPU, so that the noise does not depend on the device.
            noise = torch.randn(images.shape[1], height, width, generator=generator)
            area = images[row, :, top : top + height, left : left + width]
            area.copy_(noise, non_blocking=True)
    return images


def rectangle(u: NDArray[np.float64], height: int, width: int) -> tuple[int, int, int, int] | None:
    """Top, left, height and width of what is erased; None if no try fits into the image.

    Args:
        u: uniform numbers [2 + 2 * tries]: the position, then area and aspect ratio of each try.
        height: of the image.
        width: of the image.
    """
    low, high = map(math.log, _ERASED_RATIO)
    for area, ratio in u[2:].reshape(-1, 2):
        target = (_ERASED_AREA[0] + (_ERASED_AREA[1] - _ERASED_AREA[0]) * area) * height * width
        aspect = math.exp(low + (high - low) * ratio)
        h, w = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if h < height and w < width:
            return int(u[0] * (height - h + 1)), int(u[1] * (width - w + 1)), h, w
    return None


@dataclass(frozen=True)
class Mix:
    """How a batch is mixed.

    Attributes:
        share: of an image itself in its label; the rest is its partner's.
        box: top, bottom, left and right of what its partner replaces (CutMix); None: blended.
    """

    share: float = 1.0
    box: tuple[int, int, int, int] | None = None


def draw_mix(mixup: float, cutmix: float, size: int, seed: int, step: int) -> Mix:
    """One draw for the global batch of a step, timm's `batch` mode on one process.

    Args:
        mixup: parameter of Mixup's beta distribution; 0 leaves it out.
        cutmix: the same of CutMix.
        size: side of the images.
        seed: the training's.
        step: number of the update, from 0.
    """
    if not mixup and not cutmix:
        return Mix()
    # Imported here: only fine-tuning has to wait for SciPy.
    from scipy.special import betaincinv

    kind, amount, y, x = random.uniform(seed, 0, step, 0, random.MIX, 4)[0]
    cut = bool(cutmix) and (not mixup or kind < 0.5)
    alpha = cutmix if cut else mixup
    share = float(betaincinv(alpha, alpha, amount))
    if not cut:
        return Mix(share)
    side = int(size * math.sqrt(1 - share))

    def ends(center: int) -> tuple[int, int]:
        return max(center - side // 2, 0), min(center + (side + 1) // 2, size)

    box = (*ends(int(y * size)), *ends(int(x * size)))
    area = (box[1] - box[0]) * (box[3] - box[2])
    return Mix(1 - area / size**2, box)


def partners(batch: Tensor) -> Tensor:
    """Each row's partner: its neighbour in the random order, so no rank needs another's images."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def apply_mix(images: Tensor, mix: Mix) -> Tensor:
    """Mix images [b, 3, S, S] with their partners; b is even unless nothing is mixed."""
    if mix.box is not None:
        top, bottom, left, right = mix.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = partners(images)[:, :, top:bottom, left:right]
        return mixed
    return images if mix.share == 1 else torch.lerp(partners(images), images, mix.share)
