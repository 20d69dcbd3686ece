"""Decode an image's bytes, and resample one or several crops from one decode.

Two ways lead to the same pixels: the native extension (JPEG; within 1 level of Pillow), if it is
built, and Pillow for everything else. Pillow is the reference: an image that it cannot read in full
is unreadable and raises `UnreadableError`, which says why. EXIF orientation is not applied here, as
in torchvision's ImageFolder, with which the published numbers were made; `maect.data.convert` does
it for data sets that say so. `docs/reference/loader.md` says when which way is used.
"""

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from maect.data import native
from maect.data.native import Images

# Extension of a file in a shard, by its content and not by its name.
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif"}
EXTENSIONS |= {"TIFF": "tif", "PPM": "ppm", "AVIF": "avif", "JPEG2000": "jp2", "HEIF": "heic"}
_FORMATS = list(EXTENSIONS)
_JPEG = b"\xff\xd8"
# Larger pictures are decoded one at a time: a few kilobytes can declare gigabytes of pixels.
_LARGE = 1 << 24
_large = threading.Lock()
# Of colours of 16 bits Pillow keeps the upper bytes: the other order of bytes gives the lower ones.
# (N is the machine's own order, which is L wherever this runs.)
_BITS = 258
"""TIFF's tag of the bits of each channel."""
_OTHER_ORDER = {"16B": "16L", "16L": "16B", "16N": "16B"}
# Palette transparency and large pictures deserve a warning elsewhere. Once for the process: the
# decoding threads share its filters.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableError(Exception):
    """An image cannot be decoded; the text says why."""


def read_rgb(data: bytes) -> Image.Image:
    """Decode the whole image to RGB.

    Grey values are repeated, CMYK is converted, an alpha channel is dropped, 16-bit grey keeps its
    upper eight bits, of several frames the first is taken.
    """
    with open_image(data) as (image, _):
        return to_rgb(image)


@contextmanager
def unreadable_on_error() -> Iterator[None]:
    """Turn any error into an `UnreadableError`: readers raise nearly anything on hostile input.

    Too little memory is no fault of the image: MemoryError stays what it is.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableError(reason(error)) from None


@contextmanager
def open_image(data: bytes) -> Iterator[tuple[Image.Image, str]]:
    """Yield the decoded picture of Pillow, and the extension that its content deserves."""
    with unreadable_on_error(), _open(data) as image, one_at_a_time(image.width * image.height):
        bits = max(image.tag_v2.get(_BITS, (8,))) if isinstance(image, TiffImageFile) else 8
        if bits > 8 and len(image.getbands()) > 1 and not _has_16_bits(image):
            # Pillow takes each of their bytes for a value.
            raise UnreadableError(
                "16-bit colours in planes, which are read by a range alone: state it (`range` in "
                "the data set's `pixels`, or --pixels range=LOW,HIGH), or save the file otherwise"
            )
        image.load()
        yield image, _extension(image)


def one_at_a_time(pixels: int) -> AbstractContextManager[object]:
    """Return a context for decoding a picture of `pixels` pixels: large ones take turns."""
    if Image.MAX_IMAGE_PIXELS is not None and pixels > 2 * Image.MAX_IMAGE_PIXELS:
        raise UnreadableError(f"{pixels:,} pixels, more than {2 * Image.MAX_IMAGE_PIXELS:,}")
    return _large if pixels > _LARGE else nullcontext()


def reason(error: Exception) -> str:
    """Return the text of an error, in one line."""
    text = " ".join(str(error).split()).partition(" <_io.BytesIO")[0]
    return text or type(error).__name__


def _open(data: bytes) -> ImageFile.ImageFile:
    if not data:
        raise UnreadableError("empty file")
    if data[4:8] == b"ftyp" and data[8:11] != b"avi" and "HEIF" not in Image.OPEN:
        # Only now: nobody without such images has to wait for it.
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            heic = "HEIC needs the package pillow-heif: uv pip install pillow-heif"
            raise UnreadableError(heic) from None
        register_heif_opener()
    known = [name for name in _FORMATS if name != "HEIF" or name in Image.OPEN]
    return Image.open(io.BytesIO(data), formats=known)


def _extension(image: Image.Image) -> str:
    # MPO: a JPEG with further frames behind the first.
    return EXTENSIONS["JPEG" if image.format == "MPO" else str(image.format)]


def image_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in an image's header, without decoding it."""
    with unreadable_on_error(), _open(data) as image:
        return image.size


def is_16_bit_color(data: bytes, extension: str) -> bool:
    """Return whether it is a 16-bit colour picture, of which `open_image` keeps the upper bytes."""
    if extension not in ("png", "tif") or (extension == "png" and data[24] != 16):
        return False
    with _open(data) as image:
        return not image.mode.startswith("I") and _has_16_bits(image)


def lower_bytes(data: bytes) -> Image.Image:
    """Decode the bytes that `open_image` leaves out of a 16-bit colour picture."""
    with _open(data) as image:
        tiles = []
        for tile in image.tile:
            mode = _raw_mode(tile.args)
            kind, _, order = mode.partition(";")
            if kind not in ("RGB", "RGBA") or order not in _OTHER_ORDER:
                raise UnreadableError(
                    f"of its 16-bit pixels ({mode}) only the upper half can be read, so that no "
                    "`range` fits; save it as RGB, or as grey without transparency"
                )
            other = f"{kind};{_OTHER_ORDER[order]}"
            args = (other, *tile.args[1:]) if isinstance(tile.args, tuple) else other
            tiles.append(tile._replace(args=args))
        image.tile = tiles
        image.load()
        return image


def _has_16_bits(image: ImageFile.ImageFile) -> bool:
    """Return whether Pillow reads a picture's pixels as 16-bit values."""
    return any(";16" in _raw_mode(tile.args) for tile in image.tile)


def _raw_mode(args: object) -> str:
    """Return the raw mode (such as `RGB;16B`) that Pillow gives its decoder."""
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded picture to RGB, as `read_rgb` does."""
    if image.mode.startswith("I;16"):
        grey = np.asarray(image, dtype=np.uint16) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UnreadableError(f"pixels of mode {image.mode} have no defined range")
    return image if image.mode == "RGB" else image.convert("RGB")


def decoder_name() -> str:
    """Return the name and version of the JPEG decoder on this machine, for a run's record."""
    if native.library() is not None:
        return f"native (libjpeg-turbo {native.version()})"
    return f"Pillow {PIL.__version__}"


def render(data: bytes, geometries: NDArray[np.int32], out: Images) -> None:
    """Decode once and resample every view into `out`.

    Args:
        geometries: [v, 8] (see `maect.data.transforms`).
        out: uint8 [3, S, S] of each view, whose sizes S may differ; overwritten.
    """
    if data[:2] == _JPEG and native.render(data, geometries, out):
        return
    resample(read_rgb(data), geometries, out)


def render_whole(data: bytes, width: int, height: int) -> NDArray[np.uint8]:
    """Return all pixels as `render` gives them, uint8 [height, width, 3].

    They are rendered in square windows side by side.
    """
    side = min(width, height)
    length = max(width, height)
    starts = [min(start, length - side) for start in range(0, length, side)]
    corners = [(start, 0) if width > height else (0, start) for start in starts]
    geometries = np.array([(0, 0, width, height, width, height, *at) for at in corners], np.int32)
    windows = np.empty((len(corners), 3, side, side), np.uint8)
    render(data, geometries, windows)
    pixels = np.empty((height, width, 3), np.uint8)
    for (left, top), window in zip(corners, windows.transpose(0, 2, 3, 1), strict=True):
        pixels[top : top + side, left : left + side] = window
    return pixels


def resample(image: Image.Image, geometries: NDArray[np.int32], out: Images) -> None:
    """Resample views of a decoded picture in RGB, or of a grey one into one channel, by Pillow."""
    for geometry, target in zip(geometries.tolist(), out, strict=True):
        x, y, w, h, full_w, full_h, left, top = geometry
        size = target.shape[-1]
        crop = image if (x, y, w, h) == (0, 0, *image.size) else image.crop((x, y, x + w, y + h))
        if full_w * full_h > native.ELONGATED * size * size:
            # The full picture could be huge: resample no more than the window.
            box = (
                left * w / full_w,
                top * h / full_h,
                (left + size) * w / full_w,
                (top + size) * h / full_h,
            )
            pixels = crop.resize((size, size), Image.Resampling.BICUBIC, box=box)
        else:
            pixels = crop.resize((full_w, full_h), Image.Resampling.BICUBIC)
            if pixels.size != (size, size):
                pixels = pixels.crop((left, top, left + size, top + size))
        # Small images: the call of np.asarray would take as long as the resampling.
        rows = np.frombuffer(pixels.tobytes(), np.uint8).reshape(size, size, -1)
        target[:] = rows.transpose(2, 0, 1)
