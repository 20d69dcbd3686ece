"""Check shards against their checksums, and compare them with the images they are made of."""

import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.convert import ready_pixels
from maect.data.decode import UnreadableError
from maect.data.index import HEIGHT, OFFSET, SHARD, SIZE, WIDTH, Index, open_index
from maect.data.pixels import pixels_fault
from maect.data.shards import IMAGES_AT_ONCE


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
    faults = []
    if sha256_file(path) != recorded.get("sha256"):
        faults.append(f"{path.name}: checksum differs")
    try:
        with tarfile.open(path, "r:") as tar:
            images = {m.offset_data: m for m in tar if not m.name.endswith(".cls")}
    except tarfile.TarError as error:
        return [*faults, f"{path.name}: not a tar ({error})"]
    if len(images) != recorded.get("count"):
        faults.append(f"{path.name}: {len(images)} images, {recorded.get('count')} recorded")
    rows = np.asarray(index.rows)
    for row in rows[rows[:, SHARD] == number]:
        member = images.get(int(row[OFFSET]))
        if member is None or member.size != row[SIZE]:
            faults.append(f"{path.name}: no image at byte {row[OFFSET]} (sample {row[0]})")
    return faults


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
