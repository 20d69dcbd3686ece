"""What fine-tuning does to images beside crop and flip: RandAugment, random erasing, mixing.

As timm does it, which MAE uses, but for the dice: an image's depend on (seed, epoch, sample id)
alone, a batch's on (seed, step), so that ranks, threads and restarts change nothing.
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
from scipy.special import betaincinv
from timm.data import auto_augment
from torch import Tensor

from maect.data import random
from maect.data.augment import MEAN
from maect.data.loader import Change
from maect.evaluate.protocols import FineTune

# timm's `rand-m9-mstd0.5-inc1`: each operation at even odds, strengths normal around 9 of 10.
PROBABILITY, DEVIATION, HIGHEST = 0.5, 0.5, 10.0
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

ERASED_AREA, ERASED_RATIO, TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def randaugment(settings: FineTune, seed: int) -> Change | None:
    """What the loader does to each decoded image; None without RandAugment."""
    if not settings.randaugment_layers:
        return None
    return partial(_randaugment, seed, settings.randaugment_layers, settings.randaugment_magnitude)


def _randaugment(
    seed: int, layers: int, magnitude: float, views: NDArray[np.uint8], epoch: int, number: int
) -> None:
    dice = random.uniform(seed, epoch, number, 0, random.RAND_AUGMENT, 4 * layers)
    for operation, odds, strength, sign in dice.reshape(layers, 4):
        if odds < PROBABILITY:
            drawn = NormalDist(magnitude, DEVIATION).inv_cdf(max(strength, 2.0**-53))
            name = OPERATIONS[int(operation * len(OPERATIONS))]
            part = min(max(drawn, 0.0), HIGHEST) / HIGHEST
            apply_operation(views[0], name, part, 1 if sign < 0.5 else -1)


def apply_operation(image: NDArray[np.uint8], name: str, strength: float, sign: int) -> None:
    """One of timm's operations, in place on uint8 [3, S, S]; bicubic, filled with the mean."""
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
    dice = random.uniform(seed, epochs, ids, 0, random.ERASE, 4 + 2 * TRIES)
    for place in np.flatnonzero(dice[:, 0] < probability):
        box = rectangle(dice[place, 1:-1], images.shape[2], images.shape[3])
        if box is not None:
            top, left, height, width = box
            generator = torch.Generator().manual_seed(int(dice[place, -1] * 2.0**53))
            # On the CPU, so that the noise does not depend on the device.
            noise = torch.randn(images.shape[1], height, width, generator=generator)
            area = images[place, :, top : top + height, left : left + width]
            area.copy_(noise, non_blocking=True)
    return images


def rectangle(
    dice: NDArray[np.float64], height: int, width: int
) -> tuple[int, int, int, int] | None:
    """Top, left, height and width of what is erased; None if no try fits into the image.

    Args:
        dice: uniform numbers [2 + 2 * TRIES]: the place, then area and aspect ratio of each try.
        height: of the image.
        width: of the image.
    """
    low, high = map(math.log, ERASED_RATIO)
    for area, ratio in dice[2:].reshape(-1, 2):
        target = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area) * height * width
        aspect = math.exp(low + (high - low) * ratio)
        h, w = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if h < height and w < width:
            return int(dice[0] * (height - h + 1)), int(dice[1] * (width - w + 1)), h, w
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


def draw_mix(settings: FineTune, size: int, seed: int, step: int) -> Mix:
    """One draw for the global batch of a step, timm's `batch` mode on one process.

    Args:
        settings: which kinds of mixing, and their beta distributions.
        size: side of the images.
        seed: the training's.
        step: number of the update, from 0.
    """
    if not settings.mixes:
        return Mix()
    kind, amount, y, x = random.uniform(seed, 0, step, 0, random.MIX, 4)[0]
    cut = bool(settings.cutmix) and (not settings.mixup or kind < 0.5)
    alpha = settings.cutmix if cut else settings.mixup
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
