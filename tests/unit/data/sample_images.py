"""Small real images and folders for the tests of the data package."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from sklearn.datasets import load_sample_images


def photographs() -> list[Image.Image]:
    """scikit-learn's two photographs, 640 x 427."""
    return [Image.fromarray(image) for image in load_sample_images().images]


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def jpeg(image: Image.Image, quality: int = 90, **options: object) -> bytes:
    return encode(image, "JPEG", quality=quality, **options)


def tiff(values: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **options)
    return stream.getvalue()


def deep_png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits, which Pillow writes in grey only: uint16 [H, W, 1 to 4]."""
    height, width, channels = values.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    # Two filters, so that a row builds on the one above, in distances of whole pixels.
    stored = np.ascontiguousarray(values.astype(">u2")).view(np.uint8).reshape(height, -1)
    rows = []
    for y, row in enumerate(stored):
        before = (
            stored[y - 1] if y % 2 else np.r_[np.zeros(2 * channels, np.uint8), row][: row.size]
        )
        rows.append(bytes([1 + y % 2]) + (row - before).tobytes())
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")):
        data += struct.pack(">I", len(part)) + name + part
        data += struct.pack(">I", zlib.crc32(name + part))
    return data


def random_crop(rng: np.random.Generator, smallest: int = 24, largest: int = 200) -> Image.Image:
    """A piece of a photograph with a random size."""
    photo = photographs()[int(rng.integers(2))]
    w, h = (int(v) for v in rng.integers(smallest, largest, 2))
    x, y = int(rng.integers(photo.width - w)), int(rng.integers(photo.height - h))
    return photo.crop((x, y, x + w, y + h))


def image_folder(root: Path, classes: int = 3, per_class: int = 8, seed: int = 0) -> Path:
    """ROOT/cN/NNN.jpg: pieces of photographs of random sizes."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        for number in range(per_class):
            path = root / f"c{label}" / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(random_crop(rng), quality=int(rng.integers(60, 96))))
    return root
