"""Reads a split's shards from end to end and names whatever is not as it was written."""

import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.images import UnreadableError, read_rgb
from maect.data.index import HEIGHT, OFFSET, SHARD, SIZE, WIDTH, Index, open_index

_AT_ONCE = 64


def verify(directory: Path, *, threads: int = 1) -> int:
    """Check checksums and counts of every shard, and decode every image.

    Returns:
        Number of samples, all of them sound.

    Raises:
        UserError: the faults, one line; a shard or image is named with each.
    """
    index = open_index(directory)
    faults = _index_faults(index)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for number in range(len(index.shards)):
            faults += _shard_faults(index, number)
        for start in range(0, index.n, _AT_ONCE):
            rows = range(start, min(start + _AT_ONCE, index.n))
            faults += [fault for fault in pool.map(lambda i: _image_fault(index, i), rows) if fault]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise UserError(f"{directory}: {len(faults)} fault(s): {shown}")
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
    path, recorded = index.shards[number], index.record["shards"][number]
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
        image = read_rgb(index.read(i))
    except (UnreadableError, UserError) as error:
        return f"sample {i} ({index.key(i)!r}): {error}"
    row = index.rows[i]
    if image.size != (row[WIDTH], row[HEIGHT]):
        size = f"{image.size[0]} x {image.size[1]}"
        return f"sample {i} ({index.key(i)!r}): {size}, {row[WIDTH]} x {row[HEIGHT]} recorded"
    return None
