"""Drawn shapes on a background, with masks that are known exactly: the bundled dense data set."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.data import new_folder, random

IMAGES = {"train": 800, "val": 200}
SIDE = 32
CLASSES = ("background", "disc", "square", "triangle", "cross")
"""Of the masks' numbers 1 to 5."""
_SEED = 0
_MOST = 3  # shapes in an image
_WORDS = 10  # drawn for each shape, and for the background


def write_shapes(out: Path) -> None:
    """Write `out`/SPLIT/NNNN.png and `out`/SPLIT_masks/NNNN.png: 800 of train and 200 of val.

    An image has 32 x 32 pixels, a background with a gradient and stripes, and one to three shapes
    with stripes of their own. Colours are drawn for each image: only form tells the classes apart.
    A mask's numbers are 1 for the background and 2 to 5 for the shapes. A split that is there is
    kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    first = 0
    for split, count in IMAGES.items():
        drawn = [draw(number) for number in range(first, first + count)]
        first += count
        for name, place in ((split, 0), (f"{split}_masks", 1)):
            if not (out / name).exists():
                with new_folder(out / name) as folder:
                    for i, pair in enumerate(drawn):
                        Image.fromarray(pair[place]).save(folder / f"{i:04d}.png")


def draw(number: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return image [32, 32, 3] and mask [32, 32] of a number, the same on every machine."""
    ids = np.array([number])
    u = random.uniform(_SEED, 0, ids, 2, random.SUBSET, _WORDS * (_MOST + 1) + 1)[0]
    parts = u[1:].reshape(_MOST + 1, _WORDS)
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    base = 255 * parts[0, :3]
    image = _coloured(base, parts[0], x, y)
    mask = np.ones((SIDE, SIDE), np.uint8)
    for part in parts[1 : 2 + int(_MOST * u[0])]:
        kind = int(4 * part[9])
        radius = 4 + 5 * part[6]
        left, top = (radius + (SIDE - 2 * radius) * part[7:9]).tolist()
        inside = _inside(kind, x - left, y - top, radius)
        # At least a quarter of the range away from the background, in every colour.
        colour = (base + 64 + 128 * part[:3]) % 256
        image[inside] = _coloured(colour, part, x, y)[inside]
        mask[inside] = 2 + kind
    return np.rint(image.clip(0, 255)).astype(np.uint8), mask


def _coloured(
    colour: NDArray[np.float64], part: NDArray[np.float64], x: NDArray, y: NDArray
) -> NDArray[np.float64]:
    """A surface of a colour: darker to one side, with stripes of 2 to 5 pixels; [32, 32, 3]."""
    across = part[3] * x + (1 - part[3]) * y
    stripes = (across / (2 + 3 * part[4])).astype(int) % 2
    light = 24 * stripes - 32 * (part[5] - 0.5) * (x - y) / SIDE - 12
    return colour + light[:, :, None]


def _inside(kind: int, x: NDArray, y: NDArray, radius: float) -> NDArray[np.bool_]:
    """Return which pixels a shape around 0, 0 covers: disc, square, triangle or cross."""
    if kind == 0:
        return x * x + y * y < radius * radius
    box = np.maximum(abs(x), abs(y)) < radius
    if kind == 1:
        return box & (np.maximum(abs(x), abs(y)) < 0.85 * radius)
    if kind == 2:
        return box & (2 * abs(x) < y + radius)
    return box & (np.minimum(abs(x), abs(y)) < 0.35 * radius)
