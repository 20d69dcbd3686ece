"""Pixels of one or several crops from one decode of an image's bytes.

Three ways lead to the same pixels: the native extension (JPEG; within 1 level of Pillow), the
portable way (simplejpeg and PyTorch's antialiased bicubic; within 2 levels) and Pillow itself for
everything that the first two refuse. `docs/data.md` says when which is used.
"""

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from maect.data import native
from maect.data.images import read_rgb

_JPEG = b"\xff\xd8"


def decoder_name() -> str:
    """Which way JPEGs take on this machine, for a run's record."""
    if native.library() is not None:
        return f"native (libjpeg-turbo {native.version()})"
    return f"portable (simplejpeg {simplejpeg.__version__})"


def render(data: bytes, geometries: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    """Decode once and resample every view into `out`.

    Args:
        data: the file's bytes.
        geometries: [v, 8] (see `maect.data.transforms`).
        out: uint8 [v, 3, S, S], overwritten.

    Raises:
        UnreadableError: no decoder can read the image in full.
    """
    if data[:2] == _JPEG:
        if native.library() is not None:
            done = native.render(data, geometries, out)
        else:
            done = _render_portable(data, geometries, out)
        if done:
            return
    _render_pillow(read_rgb(data), geometries, out)


def _render_portable(data: bytes, geometries: NDArray[np.int32], out: NDArray[np.uint8]) -> bool:
    import torch

    try:
        _, _, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=True)
        if colorspace not in ("YCbCr", "RGB", "Gray"):
            return False
        # Strict: a JPEG that libjpeg only warns about is left to Pillow, the reference.
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except ValueError:
        return False
    size = out.shape[-1]
    for geometry, target in zip(geometries.tolist(), out, strict=True):
        x, y, w, h, full_w, full_h, left, top = geometry
        if full_w * full_h > 16 * size * size:
            return False  # an elongated image: Pillow resamples the window alone
        # NumPy copies the crop: PyTorch's own copy would start a thread pool in every thread.
        crop = torch.from_numpy(np.ascontiguousarray(pixels[y : y + h, x : x + w]))
        source = crop.permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            source, (full_h, full_w), mode="bicubic", antialias=True
        )
        target[:] = resized[0, :, top : top + size, left : left + size].numpy()
    return True


def _render_pillow(
    image: Image.Image, geometries: NDArray[np.int32], out: NDArray[np.uint8]
) -> None:
    size = out.shape[-1]
    for geometry, target in zip(geometries.tolist(), out, strict=True):
        x, y, w, h, full_w, full_h, left, top = geometry
        crop = image if (x, y, w, h) == (0, 0, *image.size) else image.crop((x, y, x + w, y + h))
        if full_w * full_h > 16 * size * size:
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
        rows = np.frombuffer(pixels.tobytes(), np.uint8).reshape(size, size, 3)
        target[:] = rows.transpose(2, 0, 1)
