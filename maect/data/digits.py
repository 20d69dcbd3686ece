"""scikit-learn's bundled handwritten digits as an image folder, for the demo and the tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from maect.data import new_folder, random

_VAL_PER_CLASS = 50
_SEED = 0
_NOISE = 64
_ANGLE = 30  # degrees counter-clockwise


def write_digits(out: Path) -> None:
    """Write `out`/train/CLASS/NNNN.png (1,297 images) and `out`/val/CLASS/NNNN.png (500).

    The 8 x 8 images (UCI optical recognition of handwritten digits) are enlarged to 16 x 16 RGB.
    The split has 50 validation images per class and never changes; a split that is there is kept.
    `SHIFTS` names further splits, the validation images changed: stand-ins for shifted data sets.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    rank = random.bits(_SEED, 0, np.arange(len(digits.target)), 0, random.SUBSET, 1)[:, 0]
    order = np.lexsort((rank, digits.target))
    within = np.concatenate([np.arange(n) for n in np.bincount(digits.target)])
    out.mkdir(parents=True, exist_ok=True)
    val = within < _VAL_PER_CLASS
    same = dict.fromkeys(("val", "train"), lambda image, _: image)
    for split, change in (same | SHIFTS).items():
        if (out / split).exists():
            continue
        with new_folder(out / split) as temporary:
            for number in order[~val if split == "train" else val]:
                folder = temporary / str(digits.target[number])
                folder.mkdir(exist_ok=True)
                values = np.rint(digits.images[number] * (255 / 16)).astype(np.uint8)
                grey = Image.fromarray(values).convert("RGB")
                image = change(grey.resize((16, 16), Image.Resampling.BICUBIC), int(number))
                image.save(folder / f"{number:04d}.png")


def _noisy(image: Image.Image, number: int) -> Image.Image:
    """Every value moved by up to 64 of 255 levels, evenly spread."""
    shape = np.asarray(image).shape
    u = random.uniform(_SEED, 0, np.array([number]), 1, random.SUBSET, int(np.prod(shape)))
    noise = np.rint((2 * u.reshape(shape) - 1) * _NOISE)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


SHIFTS: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "inverted": lambda image, _: ImageOps.invert(image),
    "noisy": _noisy,
    "rotated": lambda image, _: image.rotate(_ANGLE, Image.Resampling.BICUBIC),
}
