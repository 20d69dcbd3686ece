"""Check shards against their checksums, and compare them with the images they are made of."""

import hashlib
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.convert import is_turned, ready_pixels
from maect.data.decode import UnreadableError
from maect.data.index import HEIGHT, ID, LABEL, OFFSET, SHARD, SIZE, WIDTH, Index, open_index
from maect.data.pixels import pixels_fault
from maect.data.shard_plan import image_names, read_plan
from maect.data.shards import IMAGES_AT_ONCE, content_hash, ready_images
from maect.data.sources.base import Entry, ImageSource


def verify(directory: Path, *, threads: int = 1) -> int:
    """Check every shard and decode every image; return their number.

    Raises:
        UserError: with the number of faults and the first five.
    """
    index = open_index(directory)
    faults = _index_faults(index)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for number in range(len(index.shards)):
            faults += _shard_faults(index, number)
        for start in range(0, index.n, IMAGES_AT_ONCE):
            rows = range(start, min(start + IMAGES_AT_ONCE, index.n))
            found = pool.map(lambda i: _image_fault(index, i), rows)
            faults += [fault for fault in found if fault is not None]
    if not faults:
        fault = pixels_fault(index)
        if fault is not None:
            faults.append(fault)
    if faults:
        shown = "; ".join(faults[:5])
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(f"{directory}: {len(faults)} fault(s): {shown}{more}")
    return index.n


def differing_images(out: Path, source: ImageSource, entries: list[Entry]) -> list[Entry]:
    """Return those images whose bytes are others than in finished shards, of those that are there.

    An image that has become unreadable differs, too.
    """
    index = open_index(out)
    plan = read_plan(out)
    rows = {name: row for row, name in enumerate(image_names(index))}
    known = [entry for entry in entries if entry.name in rows]
    sums = index.checksums[index.rows[[rows[entry.name] for entry in known], ID]].tolist()
    with tempfile.TemporaryDirectory() as folder:
        source.read_ahead(known, Path(folder))
        images = ready_images(source, known, plan["options"], 1)
        return [
            entry
            for entry, image, crc32 in zip(known, images, sums, strict=True)
            if isinstance(image, str) or isal_zlib.crc32(image.data) != crc32
        ]


def _index_faults(index: Index) -> list[str]:
    faults = []
    for name, recorded in (("index.npy", "index_sha256"), ("keys.txt", "keys_sha256")):
        path = index.directory / name
        if not path.exists() or sha256_file(path) != index.record.get(recorded):
            faults.append(f"{name}: missing or changed")
    labels = index.labels
    if len(labels) and (labels.max() >= len(index.class_names) or labels.min() < -1):
        faults.append("index.npy: labels beyond the class names")
    return faults


def _shard_faults(index: Index, number: int) -> list[str]:
    path = index.shards[number]
    recorded = index.record["shards"][number]
    in_place = index.record.get("in_place")
    faults = []
    rows = np.asarray(index.rows)
    rows = rows[rows[:, SHARD] == number]
    # A view has some of such a tar's samples, each of which is compared when it is read.
    if not (in_place and "view_of" in index.record):
        sha256 = _contents_sha256(index, rows) if in_place else sha256_file(path)
        if sha256 != recorded.get("sha256"):
            faults.append(f"{path.name}: checksum differs")
    try:
        with tarfile.open(path, "r:") as tar:
            images = {m.offset_data: m for m in tar if not m.name.endswith(".cls")}
    except tarfile.TarError as error:
        return [*faults, f"{path.name}: not a tar ({error})"]
    if len(images) != recorded.get("count") and not in_place:
        faults.append(f"{path.name}: {len(images)} images, {recorded.get('count')} recorded")
    for row in rows:
        member = images.get(int(row[OFFSET]))
        if member is None or member.size != row[SIZE]:
            faults.append(f"{path.name}: no image at byte {row[OFFSET]} (sample {row[0]})")
    return faults


def _contents_sha256(index: Index, rows: NDArray[np.int64]) -> str:
    """Return the sha256 of samples' contents, which stands for a tar that is read in place."""
    keys = index.keys()
    digest = hashlib.sha256()
    for i, label in zip(rows[:, ID].tolist(), rows[:, LABEL].tolist(), strict=True):
        try:
            data = index.read(i)
            digest.update(content_hash(keys[i], label, data, index.turned and is_turned(data)))
        except UserError:
            return ""  # cut; the image is named when it is decoded
    return digest.hexdigest()


def _image_fault(index: Index, i: int) -> str | None:
    try:
        height, width, _ = ready_pixels(index.read(i), index.turned, index.channels).shape
    except (UnreadableError, UserError) as error:
        return f"sample {i} ({index.key(i)!r}): {error}"
    row = index.rows[i]
    if (width, height) != (row[WIDTH], row[HEIGHT]):
        recorded = f"{row[WIDTH]} x {row[HEIGHT]} recorded"
        return f"sample {i} ({index.key(i)!r}): {width} x {height}, {recorded}"
    return None
