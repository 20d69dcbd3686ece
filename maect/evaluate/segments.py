"""Images and masks as DINOv3's segmentation is trained and tested on: crops, colours, windows.

Written after facebookresearch/dinov3, `dinov3/eval/segmentation/transforms.py` and `inference.py`.
Pillow resizes images bilinearly, and masks take the number at the corner of each cell, as there.
What is drawn depends on (seed, epoch, sample) alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maect.data import random
from maect.data.convert import ready_pixels
from maect.data.decode import UnreadableError, render_whole
from maect.data.index import HEIGHT, ID, WIDTH
from maect.data.loader import results_in_order
from maect.data.order import Order
from maect.data.transforms import hue
from maect.evaluate.dense import MaskSplit

if TYPE_CHECKING:
    from maect.core.context import Context

IGNORED = 255
"""In targets: a pixel that does not count."""
TRIES = 11
LARGEST = 0.75  # share of a crop's pixels that one class may have, if another crop can be found
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, (0.5, 1.5), (0.5, 1.5), (-0.5, 0.5)
_DRAWS = 1 + 2 * TRIES + 1 + 1 + 8
_LUMA = np.array([0.2989, 0.587, 0.114], np.float32)

Pixels = NDArray[np.uint8]


class Cropping(Protocol):
    """Settings of crops, which are those of `PatchLinear`."""

    seed: int
    batch_size: int
    size: int
    ratios: tuple[float, float]
    flip: float


@dataclass(frozen=True)
class Crops:
    """Crops of a batch's images, before normalization.

    Attributes:
        images: uint8 [b, 3, S, S]; beyond `sides` they are 0.
        targets: place of each pixel's class, or `IGNORED`; uint8 [b, S, S].
        sides: height and width of what comes from the image, int64 [b, 2].
    """

    images: Tensor
    targets: Tensor
    sides: NDArray[np.int64]
    epochs: NDArray[np.int64]
    ids: NDArray[np.int64]


def picture(split: MaskSplit, row: int) -> Image.Image:
    """Read an image of a split at its own size; raise UserError if it cannot be decoded."""
    index = split.images
    (height, width) = split.images.rows[row][[HEIGHT, WIDTH]].tolist()
    try:
        data = index.read(row)
        pixels = ready_pixels(data, True, 3) if index.turned else render_whole(data, width, height)
    except UnreadableError as error:
        raise index.undecodable(row, error) from None
    return Image.fromarray(pixels, "RGB")


def resized(image: Image.Image, short: int) -> Image.Image:
    """Resize an image, bilinear, so that its shorter side has `short` pixels."""
    width, height = image.size
    if height > width:
        size = short, int(short * height / width + 0.5)
    else:
        size = int(short * width / height + 0.5), short
    return image.resize(size, Image.Resampling.BILINEAR)


def resized_mask(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize a mask [height, width] to (width, height): the number at each cell's corner."""
    height, width = mask.shape
    rows = np.arange(size[1]) * height // size[1]
    columns = np.arange(size[0]) * width // size[0]
    return mask[rows[:, None], columns]


def crop(
    image: Image.Image, mask: Pixels, draws: NDArray[np.float64], settings: Cropping
) -> tuple[Pixels, Pixels]:
    """Resize, by a ratio that is uniform between two, crop, flip and recolour one image.

    Args:
        mask: targets of its pixels, [height, width].
        draws: uniform numbers, [_DRAWS].

    Returns:
        uint8 [h, w, 3] and [h, w], at most `settings.size` each.
    """
    size = settings.size
    image = resized(image, int(size * _between(settings.ratios, draws[0])))
    mask = resized_mask(mask, image.size)
    corners = draws[1 : 1 + 2 * TRIES].reshape(TRIES, 2)
    free = np.maximum(np.array(mask.shape) - size, 0)
    for number, (top, left) in enumerate(np.floor(corners * (free + 1)).astype(int).tolist()):
        part = mask[top : top + size, left : left + size]
        counts = np.bincount(part.ravel(), minlength=256)[:IGNORED]
        several = (counts > 0).sum() > 1
        if (several and counts.max() / counts.sum() < LARGEST) or number == TRIES - 1:
            break
    pixels = np.asarray(image)[top : top + size, left : left + size]
    after = draws[1 + 2 * TRIES :]
    if after[0] < settings.flip:
        pixels, part = pixels[:, ::-1], part[:, ::-1]
    return distorted(pixels, after[1:]), part


def distorted(pixels: Pixels, draws: NDArray[np.float64]) -> Pixels:
    """Change brightness, contrast, saturation and hue, each of every second image.

    Args:
        pixels: uint8 [h, w, 3].
        draws: whether contrast comes first, then whether and how much of each, uniform, [9].
    """
    early = draws[0] >= 0.5
    changes = draws[1:].reshape(4, 2)
    brightness, contrast, saturation, shift = (
        (float(amount) if chosen >= 0.5 else None) for chosen, amount in changes
    )
    if brightness is not None:
        pixels = _scaled(pixels, 1.0, BRIGHTNESS * (2 * brightness - 1))
    if contrast is not None and early:
        pixels = _scaled(pixels, _between(CONTRAST, contrast), 0.0)
    if saturation is not None:
        factor = np.float32(_between(SATURATION, saturation))
        grey = (pixels.astype(np.float32) @ _LUMA).astype(np.uint8)[:, :, None]
        mixed = factor * pixels.astype(np.float32) + (1 - factor) * grey.astype(np.float32)
        pixels = np.clip(mixed, 0, 255).astype(np.uint8)
    if shift is not None:
        x = torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(np.float32)) / 255
        turned = hue(x, torch.tensor(_between(HUE, shift)))
        pixels = (turned[0] * 255.999).to(torch.uint8).permute(1, 2, 0).numpy()
    if contrast is not None and not early:
        pixels = _scaled(pixels, _between(CONTRAST, contrast), 0.0)
    return pixels


def _between(ends: tuple[float, float], u: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * u


def _scaled(pixels: Pixels, factor: float, more: float) -> Pixels:
    scaled = pixels.astype(np.float32) * np.float32(factor) + np.float32(more)
    return np.clip(scaled, 0, 255).astype(np.uint8)


def crops(
    split: MaskSplit,
    places: Pixels,
    settings: Cropping,
    context: Context,
    start: int,
    steps: int,
) -> Iterator[Crops]:
    """Yield this rank's part of batches `start` to `start + steps - 1`, a few decoded ahead.

    Args:
        places: of each number in a mask its class's place, or `IGNORED`; [256].
    """
    seed, size, batch = settings.seed, settings.size, settings.batch_size
    order = Order(split.images.n, seed)
    share = batch // context.world_size
    pool = ThreadPoolExecutor(max(1, context.cpus), thread_name_prefix="segments")

    def fill(out: Crops, row: int, number: int, draws: NDArray[np.float64]) -> None:
        mask = places[split.read(row)]
        pixels, part = crop(picture(split, row), mask, draws, settings)
        height, width = part.shape
        out.images[number].numpy()[:, :height, :width] = pixels.transpose(2, 0, 1)
        out.targets[number].numpy()[:height, :width] = part
        out.sides[number] = height, width

    def submitted(step: int) -> tuple[Crops, list[Future[None]]]:
        rows, epochs = order.take(step * batch + context.rank * share, share)
        ids = np.asarray(split.images.rows[rows][:, ID])
        draws = random.uniform(seed, epochs, ids, 0, random.SEGMENT, _DRAWS)
        out = Crops(
            torch.zeros(share, 3, size, size, dtype=torch.uint8),
            torch.full((share, size, size), IGNORED, dtype=torch.uint8),
            np.zeros((share, 2), np.int64),
            epochs,
            ids,
        )
        work = zip(rows.tolist(), range(share), draws, strict=True)
        return out, [pool.submit(fill, out, *each) for each in work]

    yield from results_in_order(map(submitted, range(start, start + steps)), pool)


def windows(height: int, width: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return upper left corners of windows that cover an image; the last ones end at its edges."""

    def starts(length: int) -> list[int]:
        count = max(length - size + stride - 1, 0) // stride + 1
        return [max(min(number * stride + size, length) - size, 0) for number in range(count)]

    return [(top, left) for top in starts(height) for left in starts(width)]
