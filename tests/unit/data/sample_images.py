"""Small real images and folders for the tests of the data package."""

import io
import struct
import tarfile
import zlib
from collections.abc import Iterable
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


def turned(code: int, kind: str = "JPEG", size: tuple[int, int] = (90, 61)) -> bytes:
    """A photograph with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = code
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    return encode(photographs()[0].resize(size), kind, exif=exif, **options)


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
    names = [f"c{label}/{n:03d}.jpg" for label in range(classes) for n in range(per_class)]
    images = {name: jpeg(random_crop(rng), quality=int(rng.integers(60, 96))) for name in names}
    return write_all(root, images)


def write_all(root: Path, files: dict[str, bytes]) -> Path:
    """Write files by their names below a folder."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar of named files, in this order; a name may come again."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
