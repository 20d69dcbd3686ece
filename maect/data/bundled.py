"""Write the bundled data sets as image folders: handwritten digits, and drawn shapes with masks.

The digits are scikit-learn's (UCI optical recognition of handwritten digits). The shapes lie on a
background, and their masks are known exactly.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from maect.data import new_folder, random

_SEED = 0

# --- Digits ---------------------------------------------------------------------------------------

_VAL_PER_CLASS = 50
_NOISE = 64
_ANGLE = 30  # degrees counter-clockwise


def write_digits(out: Path) -> None:
    """Write `out`/train/CLASS/NNNN.png (1,297 images) and `out`/val/CLASS/NNNN.png (500).

    The 8 x 8 images are enlarged to 16 x 16 RGB. The split never changes and has 50 validation
    images per class. Folders that exist are kept. `SHIFTS` names further splits: the validation
    images changed, as stand-ins for shifted data sets.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    rank = random.bits(_SEED, 0, np.arange(len(digits.target)), 0, random.SUBSET, 1)[:, 0]
    order = np.lexsort((rank, digits.target))
    within = np.concatenate([np.arange(n) for n in np.bincount(digits.target)])
    is_val = within < _VAL_PER_CLASS
    out.mkdir(parents=True, exist_ok=True)
    unchanged = dict.fromkeys(("val", "train"), lambda image, _: image)
    for split, change in (unchanged | SHIFTS).items():
        if (out / split).exists():
            continue
        chosen = order[~is_val] if split == "train" else order[is_val]
        with new_folder(out / split) as temporary:
            for number in chosen.tolist():
                folder = temporary / str(digits.target[number])
                folder.mkdir(exist_ok=True)
                values = np.rint(digits.images[number] * (255 / 16)).astype(np.uint8)
                grey = Image.fromarray(values).convert("RGB")
                image = change(grey.resize((16, 16), Image.Resampling.BICUBIC), number)
                image.save(folder / f"{number:04d}.png")


def _add_noise(image: Image.Image, number: int) -> Image.Image:
    """Move every value by up to 64 of 255 levels, evenly spread."""
    shape = np.asarray(image).shape
    u = random.uniform(_SEED, 0, np.array([number]), 1, random.SUBSET, int(np.prod(shape)))
    noise = np.rint((2 * u.reshape(shape) - 1) * _NOISE)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


SHIFTS: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "inverted": lambda image, _: ImageOps.invert(image),
    "noisy": _add_noise,
    "rotated": lambda image, _: image.rotate(_ANGLE, Image.Resampling.BICUBIC),
}

# --- Shapes ---------------------------------------------------------------------------------------

IMAGES = {"train": 800, "val": 200}
SIDE = 32
CLASSES = ("background", "disc", "square", "triangle", "cross")
"""Names of the masks' numbers 1 to 5."""
_MOST_SHAPES = 3
_WORDS = 10  # drawn for each shape, and for the background


def write_shapes(out: Path) -> None:
    """Write `out`/SPLIT/NNNN.png and `out`/SPLIT_masks/NNNN.png: 800 of train and 200 of val.

    An image has 32 x 32 pixels, a background with a gradient and stripes, and one to three shapes
    with stripes of their own. Colours are drawn for each image: only form tells the classes apart.
    A mask's numbers are 1 for the background and 2 to 5 for the shapes. Folders that exist are
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
    u = random.uniform(_SEED, 0, ids, 2, random.SUBSET, _WORDS * (_MOST_SHAPES + 1) + 1)[0]
    parts = u[1:].reshape(_MOST_SHAPES + 1, _WORDS)
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    base = 255 * parts[0, :3]
    image = _surface(base, parts[0], x, y)
    mask = np.ones((SIDE, SIDE), np.uint8)
    for part in parts[1 : 2 + int(_MOST_SHAPES * u[0])]:
        kind = int(4 * part[9])
        radius = 4 + 5 * part[6]
        left, top = (radius + (SIDE - 2 * radius) * part[7:9]).tolist()
        inside = _inside(kind, x - left, y - top, radius)
        # At least a quarter of the range away from the background, in every colour.
        colour = (base + 64 + 128 * part[:3]) % 256
        image[inside] = _surface(colour, part, x, y)[inside]
        mask[inside] = 2 + kind
    return np.rint(image.clip(0, 255)).astype(np.uint8), mask


def _surface(
    colour: NDArray[np.float64], part: NDArray[np.float64], x: NDArray, y: NDArray
) -> NDArray[np.float64]:
    """Return a coloured surface, [32, 32, 3]: darker to one side, with stripes of 2 to 5 pixels."""
    across = part[3] * x + (1 - part[3]) * y
    stripes = (across / (2 + 3 * part[4])).astype(int) % 2
    light = 24 * stripes - 32 * (part[5] - 0.5) * (x - y) / SIDE - 12
    return colour + light[:, :, None]


def _inside(kind: int, x: NDArray, y: NDArray, radius: float) -> NDArray[np.bool_]:
    """Return the pixels that a shape around 0, 0 covers: disc, square, triangle or cross."""
    if kind == 0:
        return x * x + y * y < radius * radius
    box = np.maximum(abs(x), abs(y)) < radius
    if kind == 1:
        return box & (np.maximum(abs(x), abs(y)) < 0.85 * radius)
    if kind == 2:
        return box & (2 * abs(x) < y + radius)
    return box & (np.minimum(abs(x), abs(y)) < 0.35 * radius)
