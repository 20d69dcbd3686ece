"""The native decoder, if it was built on this machine: partial JPEG decode and Pillow's bicubic."""

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("jpeg_crop.c")
KERNELS = Path(__file__).with_name("kernels.h")
LIBRARY = Path(__file__).with_name("libmaect_jpeg.so")
ELONGATED = 16
"""Area of a resized picture, in output windows, above which only the window is resampled."""
_OK = 0
Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""One array per view: [v, C, S, S], or a list of [C, S, S] whose sizes differ."""


def source_hash() -> str:
    """Return the identity of the C source; a library of another source is not used."""
    return hashlib.sha256(SOURCE.read_bytes() + KERNELS.read_bytes()).hexdigest()[:16]


def library() -> ctypes.CDLL | None:
    """Return the library, or None where it cannot be used."""
    return _library()[0]


def fault() -> str | None:
    """Return the reason why the library cannot be used here, or None."""
    return _library()[1]


@cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    if not LIBRARY.exists():
        return None, "not built"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.maect_source.restype = ctypes.c_char_p
        if loaded.maect_source().decode() != source_hash():
            return None, "built from another source"
    except (OSError, AttributeError) as error:
        return None, str(error)
    loaded.maect_version.restype = ctypes.c_char_p
    loaded.maect_workspace_new.restype = ctypes.c_void_p
    loaded.maect_workspace_free.argtypes = [ctypes.c_void_p]
    loaded.maect_render.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p,
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    loaded.maect_crops.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    return loaded, None


def version() -> str:
    """Return the version of libjpeg-turbo that the library was built with; needs `library()`."""
    native = library()
    assert native is not None
    return native.maect_version().decode()


class _Workspace:
    def __init__(self, native: ctypes.CDLL) -> None:
        self._free = native.maect_workspace_free
        self.handle = native.maect_workspace_new()
        if not self.handle:
            raise MemoryError

    def __del__(self) -> None:
        self._free(self.handle)


_local = threading.local()


def _workspace(native: ctypes.CDLL) -> ctypes.c_void_p:
    """Return the workspace of this thread."""
    if not hasattr(_local, "workspace"):
        _local.workspace = _Workspace(native)
    return _local.workspace.handle


def _outputs(out: Images, axes: int) -> tuple[NDArray[np.int32], NDArray[np.uintp]]:
    """Return the side of each view's pictures, and the address of its first one."""
    sizes = np.empty(len(out), np.int32)
    addresses = np.empty(len(out), np.uintp)
    for i, view in enumerate(out):
        size = view.shape[-1]
        inner = (size * size, size, 1)
        if view.ndim != axes or view.strides[-3:] != inner or view.dtype != np.uint8:
            raise ValueError("out must be uint8 [3, S, S] of each view, contiguous")
        sizes[i] = size
        addresses[i] = view.__array_interface__["data"][0]
    return sizes, addresses


def render(data: bytes, geometries: NDArray[np.int32], out: Images) -> bool:
    """Do as `maect.data.decode.render` for ordinary JPEGs; return False for all others."""
    native = library()
    if native is None:
        return False
    geometries = np.ascontiguousarray(geometries, np.int32)
    sizes, addresses = _outputs(out, 3)
    if geometries.shape != (len(out), 8):
        raise ValueError(f"geometries {geometries.shape} of {len(out)} views")
    # ctypes lets go of Python's lock during the call.
    status = native.maect_render(
        _workspace(native), data, len(data), geometries.ctypes.data,
        len(out), sizes.ctypes.data, addresses.ctypes.data,
    )  # fmt: skip
    return status == _OK


def crops(
    images: NDArray[np.uint8],
    ids: NDArray[np.int64],
    sides: NDArray[np.int64],
    geometries: NDArray[np.int32],
    out: Images,
) -> bool:
    """Resample all views of several decoded images, with the bits of `render`.

    Args:
        images: [n, H, W, 3], contiguous; image i fills the upper left corner of images[i].
        ids: which images, [b].
        sides: their widths and heights, [b, 2].
        geometries: [b, views, 8].
        out: of each view uint8 [b, 3, S, S], images contiguous; overwritten.

    Returns:
        Whether `out` was made; if not, there is no library, a crop leaves its image, or it depends
        on the file's format how `render` resamples.
    """
    native = library()
    if native is None:
        return False
    ids = np.ascontiguousarray(ids, np.int64)
    sides = np.ascontiguousarray(sides, np.int32)
    geometries = np.ascontiguousarray(geometries, np.int32)
    count, views = len(ids), len(out)
    sizes, addresses = _outputs(out, 4)
    strides = np.array([view.strides[0] for view in out], np.int64)
    if geometries.shape != (count, views, 8) or any(len(view) != count for view in out):
        raise ValueError(f"geometries {geometries.shape} of {views} views of {count} images")
    total, height, width, _ = images.shape
    if count and not (
        0 <= ids.min() <= ids.max() < total and (sides.max(0) <= (width, height)).all()
    ):
        raise ValueError("there are no such images")
    area = geometries[..., 4].astype(np.int64) * geometries[..., 5]
    if (area > ELONGATED * sizes.astype(np.int64) ** 2).any():
        return False
    status = native.maect_crops(
        _workspace(native), images.ctypes.data, images.strides[0], images.strides[1],
        ids.ctypes.data, sides.ctypes.data, geometries.ctypes.data, count, views,
        sizes.ctypes.data, addresses.ctypes.data, strides.ctypes.data,
    )  # fmt: skip
    return status == _OK
