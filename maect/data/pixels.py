"""Keep the decoded pixels of small images in an array beside their shards.

The tars stay the source: the array holds what decoding them gives, is bound to their checksums, and
is read in their place only with the native decoder, whose resampling has the same bits whatever an
image's format was. Where there is none, or none that is sound, images are decoded each time.
"""

import hashlib
import logging
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.core.files import atomic_write, seek_record, sha256_file, write_record
from maect.data import native
from maect.data.decode import UnreadableError, render_whole
from maect.data.index import HEIGHT, ID, WIDTH, Index

log = logging.getLogger(__name__)

LARGEST = 64
"""Pixels of the longer side up to which a split's images are decoded beforehand."""
# Hashing a larger array would delay every start; `maect shard --verify` always does.
_HASHED_ON_OPEN = 1 << 30


def pixels_files(index: Index) -> tuple[Path, Path]:
    """Return the paths of the array, uint8 [n, H, W, 3] by sample id, and of its record."""
    folder = index.shards[0].parent  # those of a view are in another folder
    return folder / "pixels.npy", folder / "pixels.json"


def _tars_digest(index: Index) -> str:
    """Return the identity of the tars."""
    return hashlib.sha256("".join(s["sha256"] for s in index.record["shards"]).encode()).hexdigest()


def write_pixels(index: Index) -> None:
    """Decode the images of a split, unless one is larger than `LARGEST` or it is done already.

    An image fills the upper left corner of its place, as large as the split's largest sides.
    """
    path, record = pixels_files(index)
    width, height = index.rows[:, [WIDTH, HEIGHT]].max(0).tolist()
    if max(width, height) > LARGEST or not index.plain:
        return
    shape = (index.n, height, width, 3)
    known = {"source": _tars_digest(index), "shape": list(shape)}
    if path.exists() and seek_record(record).items() >= known.items():
        return
    # Not through a memory map: a full disk would kill the process.
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for i, (w, h) in enumerate(index.rows[:, [WIDTH, HEIGHT]].tolist()):
            image = np.zeros(shape[1:], np.uint8)
            try:
                image[:h, :w] = render_whole(index.read(i), w, h)
            except UnreadableError as error:
                raise index.undecodable(i, error) from None
            file.write(image.tobytes())
    write_record(record, known | {"sha256": sha256_file(path)})


def open_pixels(index: Index) -> NDArray[np.uint8] | None:
    """Return the array of a split's images, memory-mapped; None where they must be decoded."""
    path, record = pixels_files(index)
    if native.library() is None or not record.exists() or not index.plain:
        return None
    if seek_record(record).get("source") != _tars_digest(index):
        _warn(path, "of other shards, or damaged")
        return None
    try:
        written = path.stat()
    except OSError as error:
        _warn(path, str(error.strerror))
        return None
    array = _open_array(path, written.st_mtime_ns, written.st_size)
    if array is None or index.rows[:, ID].max() >= len(array):
        _warn(path, "damaged")
        return None
    return array


@lru_cache
def _warn(path: Path, fault: str) -> None:
    log.warning(
        "%s: %s; images are decoded each time; delete it and run maect shard again", path, fault
    )


@lru_cache(maxsize=4)
def _open_array(path: Path, modified: int, size: int) -> NDArray[np.uint8] | None:
    """Open an array that matches its record, else None; hash it once for the process."""
    known = seek_record(path.with_suffix(".json"))
    try:
        if size <= _HASHED_ON_OPEN and sha256_file(path) != known.get("sha256"):
            return None
        # A plain view: memory maps of their own class are slow to index.
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError):
        return None
    sound = array.dtype == np.uint8 and list(array.shape) == known.get("shape")
    return array if sound and array.flags.c_contiguous else None


def pixels_fault(index: Index) -> str | None:
    """Compare every image with the array, if there is one; return the first fault or None."""
    path, record = pixels_files(index)
    if not record.exists():
        return None
    if not path.exists() or sha256_file(path) != seek_record(record).get("sha256"):
        return f"{path.name}: missing or changed; delete it and run maect shard again"
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    for i, row in enumerate(index.rows):
        w, h = row[[WIDTH, HEIGHT]].tolist()
        if not np.array_equal(array[row[ID], :h, :w], render_whole(index.read(i), w, h)):
            return f"{path.name}: sample {i} ({index.key(i)!r}) differs from its tar"
    return None
