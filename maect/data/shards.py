"""Writes a planned split as tars with original bytes, and merges what the jobs left to the index.

Layout of `out`: SPLIT-000000.tar … (webdataset: KEY.jpg, KEY.cls), index.npy, keys.txt and, last,
index.json; plan.json and parts/ belong to the making. Every step can be killed at any moment and
run again: what is finished stays as it is, what is not starts anew.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from maect.core.errors import UserError
from maect.core.files import atomic_write, read_json, sha256_file, write_json, write_text
from maect.data.images import UnreadableError, open_rgb
from maect.data.index import COLUMNS, FORMAT, open_index
from maect.data.plan import plan_shards, read_listing, read_plan, record_path, shard_name
from maect.data.sources import UNLABELLED, Entry, read_entry

_BLOCK = 512
_AT_ONCE = 64
_QUALITY = 95


@dataclass(frozen=True)
class _Image:
    data: bytes
    extension: str
    width: int
    height: int


def shard(
    source: Path, out: Path, kind: str, shards: int, *, threads: int = 1, **options: Any
) -> int:
    """Plan, write and index a split in one go; continues where an earlier call was stopped.

    Args:
        source, out, kind, shards, options: see `plan_shards`.
        threads: images decoded at once.

    Returns:
        Number of samples.

    Raises:
        UserError: wrong input; all unreadable images of the split are reported together.
    """
    plan_shards(source, kind, out, shards, **options)
    faults: list[str] = []
    for number in range(shards):
        try:
            _write(Path(out), number, threads)
        except _FaultyError as error:
            faults += error.faults
    if faults:
        raise _refusal(Path(out) / "unreadable.txt", faults)
    return finish_index(out)


def write_shard(out: Path, number: int, *, threads: int = 1) -> Path:
    """Write one planned shard, unless it is finished; every image is decoded once to prove it.

    Returns:
        The tar.

    Raises:
        UserError: no such shard, or unreadable images, named.
    """
    out = Path(out)
    try:
        _write(out, number, threads)
    except _FaultyError as error:
        # A file of its own: other jobs may be writing theirs.
        raise _refusal(out / f"unreadable-{number:06d}.txt", error.faults) from None
    return out / shard_name(read_plan(out)["split"], number)


def is_finished(out: Path, number: int) -> bool:
    """Whether a shard of the present plan is complete."""
    plan, path = read_plan(out), record_path(out, number)
    if not path.exists():
        return False
    record, tar = read_json(path), out / shard_name(plan["split"], number)
    same = (record["listing"], record["options"]) == (plan["listings"][number], plan["options"])
    return same and tar.exists() and tar.stat().st_size == record["size"]


class _FaultyError(Exception):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults


def _write(out: Path, number: int, threads: int) -> None:
    """Write a shard unless it is finished; with unreadable images nothing is written."""
    start, entries = read_listing(out, number)
    if is_finished(out, number):
        return
    plan = read_plan(out)
    root = Path(plan["source"])
    root = root if root.is_dir() else root.parent
    tar = out / shard_name(plan["split"], number)
    rows: list[tuple[int, ...]] = []
    hashes: list[bytes] = []
    faults: list[str] = []
    with atomic_write(tar) as temporary:
        with open(temporary, "wb") as raw:
            file = _Hashed(raw)
            images = _prepare(root, [e for _, e in entries], plan["options"], threads)
            for place, ((key, entry), image) in enumerate(zip(entries, images, strict=True)):
                if isinstance(image, str):
                    name = entry.name.encode("utf-8", "backslashreplace").decode()
                    faults.append(f"{name} ({image})")
                if faults or isinstance(image, str):
                    continue  # read on, to name all of them at once
                offset = _add(file, f"{key}.{image.extension}", image.data)
                if entry.label != UNLABELLED:
                    _add(file, f"{key}.cls", str(entry.label).encode())
                size = len(image.data)
                rows.append(
                    (start + place, number, offset, size, entry.label, image.width, image.height)
                )
                hashes.append(_content(key, entry.label, image.data))
            file.write(bytes(2 * _BLOCK))
        if faults:
            raise _FaultyError(faults)
    parts = record_path(out, number)
    with atomic_write(parts.with_suffix(".npz")) as temporary, open(temporary, "wb") as stream:
        content = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
        np.savez(stream, rows=np.array(rows, np.int64), content=content)
    write_json(
        parts,
        {
            "file": tar.name,
            "count": len(rows),
            "size": file.written,
            "sha256": file.digest.hexdigest(),
            "listing": plan["listings"][number],
            "options": plan["options"],
        },
    )


def finish_index(out: Path) -> int:
    """Merge the finished shards' parts to index.npy, keys.txt and index.json (written last).

    Returns:
        Number of samples.

    Raises:
        UserError: shards are missing, by number.
    """
    out = Path(out)
    plan = read_plan(out)
    missing = [number for number in range(plan["shards"]) if not is_finished(out, number)]
    if missing:
        first = ", ".join(map(str, missing[:5]))
        raise UserError(f"{out}: {len(missing)} shards are not written (number {first} first)")
    if _is_indexed(out, plan):
        return plan["n"]
    digest = hashlib.sha256("\n".join(plan["class_names"]).encode())
    keys: list[str] = []
    with atomic_write(out / "index.npy") as temporary:
        # Opened by name with the suffix that NumPy would otherwise append.
        rows = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.int64, shape=(plan["n"], len(COLUMNS))
        )
        for number in range(plan["shards"]):
            with np.load(record_path(out, number).with_suffix(".npz")) as part:
                start = int(part["rows"][0, 0])
                rows[start : start + len(part["rows"])] = part["rows"]
                digest.update(part["content"].tobytes())
            keys += [key for key, _ in read_listing(out, number)[1]]
        rows.flush()
    write_text(out / "keys.txt", "".join(f"{key}\n" for key in keys))
    records = [read_json(record_path(out, number)) for number in range(plan["shards"])]
    shards = [{name: r[name] for name in ("file", "count", "size", "sha256")} for r in records]
    same = ("split", "kind", "n", "class_names", "ignored", "excluded", "options", "listings")
    write_json(
        out / "index.json",
        {
            "format": FORMAT,
            "digest": digest.hexdigest(),
            "index_sha256": sha256_file(out / "index.npy"),
            "keys_sha256": sha256_file(out / "keys.txt"),
            **{name: plan[name] for name in same},
            "shards": shards,
        },
    )
    # Of steps that were killed, or refused images that have been repaired since.
    for pattern in (".*.tmp", "parts/.*.tmp", "unreadable*.txt"):
        for leftover in out.glob(pattern):
            leftover.unlink(missing_ok=True)
    return plan["n"]


def _is_indexed(out: Path, plan: dict[str, Any]) -> bool:
    if not all((out / name).exists() for name in ("index.json", "index.npy", "keys.txt")):
        return False
    if read_json(out / "index.json").get("listings") != plan["listings"]:
        return False
    try:
        open_index(out)
    except UserError:
        return False
    return True


def _prepare(
    root: Path, entries: list[Entry], options: dict[str, Any], threads: int
) -> Iterator[_Image | str]:
    """The images in order, or why one cannot be read; a bounded number in memory."""

    def one(entry: Entry) -> _Image | str:
        try:
            data = read_entry(root, entry)
            picture, extension = open_rgb(data)
        except UnreadableError as error:
            return str(error)
        except OSError as error:
            return str(error.strerror)
        side = options.get("shorter_side")
        if side is not None and min(picture.size) > side:
            return _recompress(picture, side)
        return _Image(data, extension, *picture.size)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for i in range(0, len(entries), _AT_ONCE):
            yield from pool.map(one, entries[i : i + _AT_ONCE])


def _recompress(picture: Image.Image, side: int) -> _Image:
    width, height = picture.size
    short = min(width, height)
    size = (round(width * side / short), round(height * side / short))
    stream = io.BytesIO()
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    resized.save(stream, "JPEG", quality=_QUALITY, subsampling=0)
    return _Image(stream.getvalue(), "jpg", *size)


def _content(key: str, label: int, data: bytes) -> bytes:
    return hashlib.sha256(f"{key}\0{label}\0".encode() + hashlib.sha256(data).digest()).digest()


class _Hashed:
    """A file that knows its length and sha256 while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.written = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.written += len(data)


def _add(file: _Hashed, name: str, data: bytes) -> int:
    """Append a member with a header that holds nothing but name and size; returns its offset."""
    header = tarfile.TarInfo(name)
    header.size = len(data)
    file.write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict"))
    offset = file.written
    file.write(data)
    file.write(bytes(-len(data) % _BLOCK))
    return offset


def _refusal(report: Path, faults: list[str]) -> UserError:
    write_text(report, "".join(f"{fault}\n" for fault in faults))
    shown = ", ".join(faults[:3]) + (", …" if len(faults) > 3 else "")
    return UserError(
        f"{len(faults)} unreadable image(s): {shown}; all are listed in {report}. Repair or "
        "remove them, or name them in a file for --exclude"
    )
