"""Transform images: crops, colours, RandAugment, erasing, mixing.

The changes of an image depend on (seed, epoch, sample id, view) alone, those of a batch on
(seed, step). Both come from the counter-based generator, so ranks, threads and restarts change
nothing. Crops and RandAugment are done by the loader's threads, everything else in batches on the
images' device.

A geometry says which part of an image goes where. It is eight int32: the source box (x, y, width,
height) in pixels of the image, the size (width, height) to which that box is resized, and the
corner (left, top) of the output window in the resized box.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from maect.core.distributed import to_device_async
from maect.data import random
from maect.recipes import IMAGENET, Pixels, View

MEAN, STD = IMAGENET

# --- Cropping -------------------------------------------------------------------------------------

_CROP_TRIES = 10
_CROP_RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = 0.28768207245178093  # ln(4/3): log aspect ratios are uniform from -ln(4/3) on


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e^x for |x| < 0.3 to the last bits, from sums and products only.

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
    """Draw geometries [b, 8] of random resized crops (Inception crops, as torchvision draws them).

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
    narrow = shape < _CROP_RATIO[0]
    wide = shape > _CROP_RATIO[1]
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
    """Return geometries [b, 8]: shorter side resized to `resize`, then the central square."""
    wide = width > height
    short = np.minimum(width, height)
    long = resize * np.maximum(width, height) // short
    full_w = np.where(wide, long, resize)
    full_h = np.where(wide, resize, long)
    left = np.rint((full_w - size) / 2.0)
    top = np.rint((full_h - size) / 2.0)
    zero = np.zeros_like(width)
    return np.stack([zero, zero, width, height, full_w, full_h, left, top], 1).astype(np.int32)


def whole_images(
    width: NDArray[np.int64], height: NDArray[np.int64], size: int
) -> NDArray[np.int32]:
    """Return geometries [b, 8]: the whole image squeezed into a square of `size` pixels."""
    zero = np.zeros_like(width)
    whole = np.full_like(width, size)
    return np.stack([zero, zero, width, height, whole, whole, zero, zero], 1).astype(np.int32)


# --- Normalization and colours --------------------------------------------------------------------

BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
SIGMA = (0.1, 2.0)
SOLARIZE_FROM = 128 / 255
_LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601, as Pillow and torchvision


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one number per channel, [C, 1, 1], copied to a device once, not in every step."""
    with torch.inference_mode(False):  # whoever asks first
        return torch.tensor(values, device=device).view(-1, 1, 1)


def normalize(images: Tensor, pixels: Pixels) -> Tensor:
    """Remove the mean of each channel and divide by its standard deviation.

    Args:
        images: uint8 [b, C, S, S], or float in [0, 1].

    Returns:
        float32 [b, C, S, S].
    """
    mean, std = (_constant(values, images.device) for values in pixels.statistics)
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return (images - mean) / std


@dataclass(frozen=True)
class PixelChanges:
    """Changes to the pixels of each of n cropped images.

    Attributes:
        flipped, jittered, blurred, grey, solarized: whether, [n].
        strengths: uniform numbers [n, 4], of brightness, contrast, saturation and hue.
        order: uniform numbers [n, 4]; their ranks are the order of these four.
        sigma: standard deviation of the blur in pixels, [n].
    """

    flipped: NDArray[np.bool_]
    jittered: NDArray[np.bool_]
    blurred: NDArray[np.bool_]
    grey: NDArray[np.bool_]
    solarized: NDArray[np.bool_]
    strengths: NDArray[np.float64]
    order: NDArray[np.float64]
    sigma: NDArray[np.float64]


def draw_changes(
    views: Mapping[int, View], seed: int, epochs: ArrayLike, ids: ArrayLike
) -> PixelChanges:
    """Draw the changes of all samples in the first view, then of all in the next, and so on.

    Order and strengths are those of the authors' code (BYOL's strengths).

    Args:
        views: probabilities of each change, by the number of the view, which draws its own.
    """
    flips = []
    uniforms = []
    likely = []
    for number, view in views.items():
        flips.append(random.uniform(seed, epochs, ids, number, random.FLIP, 1)[:, 0] < view.flip)
        colours = view.jitter, view.blur, view.gray, view.solarize
        if any(colours):
            uniforms.append(random.uniform(seed, epochs, ids, number, random.COLOR, 13))
        else:
            uniforms.append(np.zeros((len(flips[-1]), 13)))
        likely.append(np.tile(colours, (len(flips[-1]), 1)))
    # Number 0 decides on jitter, 1 to 4 are its strengths and 5 to 8 its order; 9 decides on blur,
    # and 10 is its sigma; 11 and 12 decide on grey and solarize.
    u = np.concatenate(uniforms)
    jittered, blurred, grey, solarized = (u[:, [0, 9, 11, 12]] < np.concatenate(likely)).T
    return PixelChanges(
        flipped=np.concatenate(flips),
        jittered=jittered,
        blurred=blurred,
        grey=grey,
        solarized=solarized,
        strengths=u[:, 1:5],
        order=u[:, 5:9],
        sigma=SIGMA[0] + (SIGMA[1] - SIGMA[0]) * u[:, 10],
    )


def apply_changes(images: Tensor, changes: PixelChanges, pixels: Pixels) -> Tensor:
    """Flip, jitter, blur, grey and solarize cropped images, then normalize.

    Args:
        images: uint8 [n, C, S, S], on any device; jitter and grey need three channels.

    Returns:
        float32 [n, C, S, S], normalized, on the device of `images`.
    """
    mean, std = (_constant(values, images.device) for values in pixels.statistics)
    x = images.float().div_(255)
    _change_rows(x, changes.flipped, lambda y, _: y.flip(3))
    x = jitter(x, changes.jittered, changes.strengths, changes.order)
    _change_rows(x, changes.blurred, lambda y, rows: blur(y, changes.sigma[rows]))
    _change_rows(x, changes.grey, lambda y, _: luma(y).expand_as(y))
    _change_rows(x, changes.solarized, lambda y, _: solarize(y))
    return x.sub_(mean).div_(std)


def denormalize(images: Tensor, pixels: Pixels) -> Tensor:
    """Return the nearest uint8 pixels of normalized images [b, C, S, S]."""
    mean, std = (_constant(values, images.device) for values in pixels.statistics)
    return ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def augment(
    images: Tensor,
    view: View,
    view_number: int,
    seed: int,
    epochs: ArrayLike,
    ids: ArrayLike,
    pixels: Pixels,
) -> Tensor:
    """Make one view of cropped images, uint8 [b, C, S, S]: draw and apply its changes."""
    return apply_changes(images, draw_changes({view_number: view}, seed, epochs, ids), pixels)


def _change_rows(
    x: Tensor, chosen: NDArray[np.bool_], change: Callable[[Tensor, NDArray[np.int64]], Tensor]
) -> None:
    """Replace the chosen rows by `change(images, rows)`; the host knows them without waiting."""
    rows = np.flatnonzero(chosen)
    if len(rows):
        index = to_device_async(torch.from_numpy(rows), x.device)
        x.index_copy_(0, index, change(x.index_select(0, index), rows))


def jitter(
    x: Tensor, chosen: NDArray[np.bool_], strengths: NDArray[np.float64], order: NDArray[np.float64]
) -> Tensor:
    """Change brightness, contrast, saturation and hue in random order, as ColorJitter does.

    All but hue are blends, and blends of all kinds one operation. Images whose hue comes late lie
    before those whose hue comes early: so each blend takes place in an interval of them, before the
    hue of all or behind it.

    Args:
        x: float [b, 3, S, S] in [0, 1].
        strengths: uniform numbers [b, 4], one per change.
        order: uniform numbers [b, 4]; their ranks are the order of the changes.
    """
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return x
    width = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE])
    factors = (2 * strengths - 1) * width + np.array([1.0, 1.0, 1.0, 0.0])
    sequence = np.argsort(order, axis=1, kind="stable")
    before = np.argmax(sequence == 3, axis=1)  # blends before the hue
    rows = rows[np.argsort(-before[rows], kind="stable")]
    blends = sequence[rows][sequence[rows] != 3].reshape(-1, 3)
    factors = factors[rows]
    # One copy to the device: the hue's shift, then each blend's factor and what it blends with.
    table = np.concatenate(
        [
            factors[:, 3:],
            np.take_along_axis(factors, blends, 1),
            blends == 1,
            blends == 2,
        ],
        axis=1,
    )
    index = to_device_async(torch.from_numpy(rows), x.device)
    parameters = to_device_async(torch.from_numpy(table.astype(np.float32)), x.device)
    parameters = parameters[:, :, None, None, None]
    y = x.index_select(0, index)
    late = [int((before[rows] > number).sum()) for number in range(3)]
    for number in range(3):
        part = slice(None, late[number])
        blend_(y[part], *(parameters[part, number + first] for first in (1, 4, 7)))
    y = hue(y, parameters[:, 0])
    for number in range(3):
        part = slice(late[number], None)
        blend_(y[part], *(parameters[part, number + first] for first in (1, 4, 7)))
    return x.index_copy(0, index, y)


def luma(x: Tensor) -> Tensor:
    """Return the grey values, [b, 1, S, S]."""
    return (x * _constant(_LUMA, x.device)).sum(1, keepdim=True)


def blend_(x: Tensor, factor: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Scale the distance from black, from the mean grey or from each pixel's grey, in place.

    Args:
        x: [b, 3, S, S].
        factor: [b, 1, 1, 1], like the next two.
        contrast: 1 where the origin is the image's mean grey value, else 0.
        saturation: 1 where it is each pixel's grey value, else 0; with neither it is black.
    """
    if not len(x):
        return x
    grey = luma(x)
    other = torch.addcmul(contrast * grey.mean((2, 3), keepdim=True), grey, saturation)
    return x.sub_(other).mul_(factor).add_(other).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift`, [b, 1, 1, 1], of the whole circle."""
    low, high = x.aminmax(dim=1, keepdim=True)
    chroma = high - low
    divisor = chroma.masked_fill(chroma == 0, 1)
    # By the largest channel: (g - b) / chroma, 2 + (b - r) / chroma or 4 + (r - g) / chroma.
    sectors = (x.roll(-1, 1) - x.roll(1, 1)).div_(divisor).add_(_constant((0, 2, 4), x.device))
    red, green, _ = (x == high).split(1, 1)
    sector = torch.where(green, sectors[:, 1:2], sectors[:, 2:])
    sector = torch.where(red, sectors[:, :1], sector)
    angle = sector.div_(6).add_(shift).remainder_(1).mul_(6)
    # Channel n of an HSV colour: V - C max(0, min(k, 4 - k, 1)), k = (n + H/60) mod 6.
    k = (_constant((5, 3, 1), x.device) + angle).remainder_(6)
    return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)


def blur(x: Tensor, sigma: NDArray[np.float64]) -> Tensor:
    """Blur each sample by a Gaussian of its own standard deviation in pixels, edges repeated.

    A blur along one side is a product with a banded matrix, which batches well.
    """
    rows = _blur_matrix(sigma, x.shape[2], x.device)
    square = x.shape[2] == x.shape[3]
    columns = rows if square else _blur_matrix(sigma, x.shape[3], x.device)
    return (rows[:, None] @ x @ columns.transpose(1, 2)[:, None]).clamp_(0, 1)


# Beyond four standard deviations nothing is left that eight bits could show.
_REACH = int(np.ceil(4 * SIGMA[1]))


def _blur_matrix(sigma: NDArray[np.float64], size: int, device: torch.device) -> Tensor:
    """Return [b, size, size]; row i has the weights of output pixel i."""
    table = to_device_async(_blur_table(sigma), device)
    return table.index_select(1, _blur_index(size, device)).view(-1, size, size)


def _blur_table(sigma: NDArray[np.float64]) -> Tensor:
    """Return the weights of all taps, their sums up to each and from each on, and 0; on the CPU.

    The sums are weights of what lies outside an image. On a GPU they would have no fixed order.
    """
    taps = torch.arange(-_REACH, _REACH + 1, dtype=torch.float32)
    width = torch.from_numpy(sigma.astype(np.float32)).view(-1, 1)
    weights = torch.softmax(-(taps**2) / (2 * width**2), 1)
    lower, upper = torch.zeros_like(weights), torch.zeros_like(weights)
    for tap in range(len(taps)):
        lower[:, tap:] += weights[:, tap : tap + 1]
        upper[:, : tap + 1] += weights[:, tap : tap + 1]
    return torch.cat([weights, lower, upper, weights.new_zeros(len(sigma), 1)], dim=1)


@cache
def _blur_index(size: int, device: torch.device) -> Tensor:
    """Return the column of `_blur_table` of each element of a matrix, [size * size]."""
    taps = 2 * _REACH + 1
    outputs, inputs = np.indices((size, size))
    tap = inputs - outputs + _REACH
    nothing = 3 * taps
    index = np.where((tap >= 0) & (tap < taps), tap, nothing)
    first = tap[:, 0]
    last = tap[:, -1]
    index[:, 0] = np.where(first >= 0, taps + first, nothing)
    index[:, -1] = np.where(last < taps, 2 * taps + last, nothing)
    return torch.from_numpy(index.flatten()).to(device)


def solarize(x: Tensor) -> Tensor:
    """Invert values at or above 128 of 255."""
    return torch.where(x >= SOLARIZE_FROM, 1 - x, x)


# --- RandAugment, erasing and mixing: timm's, but for the draws -----------------------------------

Change = Callable[[Sequence[NDArray[np.uint8]], int, int], None]
"""Changes a sample's views, uint8 [3, S, S] each, in place, given its epoch and its id."""

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
    """Return RandAugment (Cubuk et al. 2020) of each image's first view, for the loader.

    Args:
        layers: number of operations in a row; 0: return None.
        magnitude: their mean strength, 0 to 10.
    """

    def change(views: Sequence[NDArray[np.uint8]], epoch: int, sample: int) -> None:
        u = random.uniform(seed, epoch, sample, 0, random.RAND_AUGMENT, 4 * layers)
        for operation, odds, strength, sign in u.reshape(layers, 4):
            if odds < _PROBABILITY:
                drawn = NormalDist(magnitude, _STRENGTH_STD).inv_cdf(max(strength, 2.0**-53))
                name = OPERATIONS[int(operation * len(OPERATIONS))]
                part = min(max(drawn, 0.0), _STRONGEST) / _STRONGEST
                apply_operation(views[0], name, part, 1 if sign < 0.5 else -1)

    return change if layers else None


def apply_operation(image: NDArray[np.uint8], name: str, strength: float, sign: int) -> None:
    """Apply one of timm's operations in place to uint8 [3, S, S]; bicubic, filled with the mean."""
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

    Images are normalized, float [b, C, S, S].
    """
    if not probability:
        return images
    u = random.uniform(seed, epochs, ids, 0, random.ERASE, 4 + 2 * _ERASE_TRIES)
    _, channels, rows, columns = images.shape
    boxes, noise = np.zeros((len(u), 4), np.int64), []
    for row in np.flatnonzero(u[:, 0] < probability):
        box = rectangle(u[row, 1:-1], rows, columns)
        if box is not None:
            top, left, height, width = box
            boxes[row] = top, top + height, left, left + width
            generator = torch.Generator().manual_seed(int(u[row, -1] * 2.0**53))
            # On the CPU, so that the noise does not depend on the device.
            noise.append(torch.randn(channels * height * width, generator=generator))
    if noise:
        ends = to_device_async(torch.from_numpy(boxes), images.device)
        top, bottom, left, right = ends.T[..., None, None]
        down, across = (torch.arange(side, device=images.device) for side in (rows, columns))
        inside = (down >= top) & (down < bottom)
        inside = inside.transpose(1, 2) & (across >= left) & (across < right)
        filling = to_device_async(torch.cat(noise), images.device)
        images.masked_scatter_(inside[:, None], filling)  # row by row, as the noise was drawn
    return images


def rectangle(u: NDArray[np.float64], height: int, width: int) -> tuple[int, int, int, int] | None:
    """Return top, left, height and width of the erased rectangle; None if no try fits.

    Args:
        u: uniform numbers [2 + 2 * tries]: the position, then area and aspect ratio of each try.
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
    """Mixture of a batch in pairs.

    Attributes:
        share: part of the image in its label; the rest is its partner's.
        box: top, bottom, left and right of the part that the partner replaces (CutMix); None for a
            blend of both (Mixup).
    """

    share: float = 1.0
    box: tuple[int, int, int, int] | None = None


def draw_mix(mixup: float, cutmix: float, size: int, seed: int, step: int) -> Mix:
    """Draw the mixture of a step's global batch, as timm's `batch` mode on one process.

    Args:
        mixup: parameter of Mixup's beta distribution; 0 leaves it out.
        cutmix: the same of CutMix.
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
    """Return each row's partner: its neighbour in the batch, so no rank needs another's images."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def apply_mix(images: Tensor, mix: Mix) -> Tensor:
    """Mix images [b, C, S, S] with their partners; b is even unless nothing is mixed."""
    if mix.box is not None:
        top, bottom, left, right = mix.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = partners(images)[:, :, top:bottom, left:right]
        return mixed
    return images if mix.share == 1 else torch.lerp(partners(images), images, mix.share)
