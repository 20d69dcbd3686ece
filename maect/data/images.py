"""One image's bytes to pixels: what is accepted, and how odd files are read.

Pillow is the referee: an image that it cannot read in full is unreadable. EXIF orientation is not
applied, as in torchvision's ImageFolder, with which the published numbers were made.
"""

import io
import warnings

import numpy as np
from PIL import Image

# What a file is called in a shard, by its content and not by its name.
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif"}
EXTENSIONS |= {"TIFF": "tif", "PPM": "ppm"}
_FORMATS = list(EXTENSIONS)
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
# Palette transparency and large pictures deserve a warning elsewhere. Once for the process: the
# decoding threads share its filters.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableError(Exception):
    """An image that cannot be decoded; the text says why."""


def read_rgb(data: bytes) -> Image.Image:
    """Decode the whole image to RGB.

    Grey values are repeated, CMYK is converted, an alpha channel is dropped, 16-bit grey keeps its
    upper eight bits, of several frames the first is taken.

    Raises:
        UnreadableError: empty, truncated, corrupt, or of a pixel format without a defined range.
    """
    return open_rgb(data)[0]


def open_rgb(data: bytes) -> tuple[Image.Image, str]:
    """Like `read_rgb`, with the extension that the content deserves."""
    if not data:
        raise UnreadableError("empty file")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            image.load()
            # MPO: a JPEG with further frames behind the first.
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            return _to_rgb(image), EXTENSIONS[kind]
    except UnreadableError:
        raise
    # Pillow's plug-ins raise nearly anything on hostile input.
    except Exception as error:
        raise UnreadableError(" ".join(str(error).split()) or type(error).__name__) from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        grey = np.asarray(image, dtype=np.uint16) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UnreadableError(f"pixels of mode {image.mode} have no defined range")
    return image if image.mode == "RGB" else image.convert("RGB")
