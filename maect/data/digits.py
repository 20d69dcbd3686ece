"""scikit-learn's bundled handwritten digits as an image folder, for the demo and the tests."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from maect.data import random

_VAL_PER_CLASS = 50
_SEED = 0
_NOISE = 64
_ANGLE = 30


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
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    val = within < _VAL_PER_CLASS
    same = {"val": (val, lambda image, _: image), "train": (~val, lambda image, _: image)}
    shifted = {name: (val, change) for name, change in SHIFTS.items()}
    for split, (chosen, change) in {**same, **shifted}.items():
        if (out / split).exists():
            continue
        # A split appears at once: far quicker than making each small file durable.
        temporary = Path(tempfile.mkdtemp(prefix=f".{split}-", dir=out))
        try:
            for number in order[chosen]:
                folder = temporary / str(digits.target[number])
                folder.mkdir(exist_ok=True)
                image = change(_enlarged(digits.images[number]), int(number))
                image.save(folder / f"{number:04d}.png")
            temporary.chmod(0o755)
            os.replace(temporary, out / split)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _enlarged(image: np.ndarray) -> Image.Image:
    """Values 0 to 16 at 8 x 8 to grey RGB at 16 x 16."""
    grey = Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8))
    return grey.convert("RGB").resize((16, 16), Image.Resampling.BICUBIC)


def _inverted(image: Image.Image, number: int) -> Image.Image:
    """Dark on light."""
    return ImageOps.invert(image)


def _noisy(image: Image.Image, number: int) -> Image.Image:
    """Every value moved by up to 64 of 255 levels, evenly spread."""
    shape = np.asarray(image).shape
    u = random.uniform(_SEED, 0, np.array([number]), 1, random.SUBSET, int(np.prod(shape)))
    noise = np.rint((2 * u.reshape(shape) - 1) * _NOISE)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _rotated(image: Image.Image, number: int) -> Image.Image:
    """Turned by 30 degrees counter-clockwise."""
    return image.rotate(_ANGLE, Image.Resampling.BICUBIC)


SHIFTS: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "inverted": _inverted,
    "noisy": _noisy,
    "rotated": _rotated,
}
