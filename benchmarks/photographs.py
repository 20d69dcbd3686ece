"""JPEGs with ImageNet's statistics, made from the photographs that other packages ship."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

BYTES_PER_PIXEL = 0.55  # 110 kB at 0.2 megapixels, measured on 1,000 images of ImageNet


def originals() -> list[Image.Image]:
    """scikit-learn's two photographs, and scikit-image's where it is installed."""
    images = [Image.fromarray(image) for image in load_sample_images().images]
    try:
        from skimage import data
    except ImportError:
        return images
    for name in ("astronaut", "coffee", "chelsea", "rocket"):
        images.append(Image.fromarray(getattr(data, name)()).convert("RGB"))
    return images


def write_folder(root: Path, count: int, seed: int = 0) -> Path:
    """ROOT/CLASS/NNNN.jpg in ten classes: sizes, bytes and chroma as in ImageNet."""
    rng = np.random.default_rng(seed)
    sources = originals()
    for number in range(count):
        photo = sources[int(rng.integers(len(sources)))]
        long = int(rng.choice([500, 500, 500, 640, 400]))
        short = int(long * rng.choice([0.75, 0.75, 0.67, 1.0]))
        size = (long, short) if rng.random() < 0.75 else (short, long)
        scale = max(size[0] / photo.width, size[1] / photo.height, rng.uniform(0.8, 1.3))
        photo = photo.resize((round(photo.width * scale) + 1, round(photo.height * scale) + 1))
        x = int(rng.integers(photo.width - size[0] + 1))
        y = int(rng.integers(photo.height - size[1] + 1))
        photo = photo.crop((x, y, x + size[0], y + size[1]))
        chroma = rng.random()
        if chroma < 0.023:
            photo = photo.convert("L")
        data = _encode(photo, subsampling=2 if chroma < 0.223 else 0)
        path = root / f"class{number % 10}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def _encode(photo: Image.Image, subsampling: int) -> bytes:
    """The quality whose size comes nearest to ImageNet's mean bytes per pixel."""
    target = BYTES_PER_PIXEL * photo.width * photo.height
    low, high, best = 50, 99, b""
    while low <= high:
        middle = (low + high) // 2
        stream = io.BytesIO()
        photo.save(stream, "JPEG", quality=middle, subsampling=subsampling)
        data = stream.getvalue()
        if not best or abs(len(data) - target) < abs(len(best) - target):
            best = data
        low, high = (middle + 1, high) if len(data) < target else (low, middle - 1)
    return best
