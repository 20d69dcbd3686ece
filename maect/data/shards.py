"""Write the shards of a split: tars with the images' original bytes, and an index.

Layout of `out`: SPLIT-000000.tar … (webdataset: KEY.jpg, KEY.cls), index.npy, keys.txt and, last,
index.json; of small images also pixels.npy. plan.json and parts/ record how far the job is: killed
at any moment, it continues with the first shard that is not finished.
"""

import errno
import fcntl
import hashlib
import io
import logging
import shlex
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray
from PIL import Image

from maect.core.errors import UserError, counted, reason
from maect.core.files import (
    FINAL,
    atomic_write,
    read_record,
    sha256_file,
    with_retries,
    write_record,
    write_text,
)
from maect.data import shard_name
from maect.data.changes import files_digest
from maect.data.convert import Ready, make_ready, upright_rgb
from maect.data.decode import UnreadableError
from maect.data.image_facts import TURNED, Facts, merged, warning
from maect.data.index import CHECKSUMS, COLUMNS, ID, open_index
from maect.data.pixels import write_pixels
from maect.data.shard_plan import plan_shards, read_listing, store_plan, stored_options
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, as_utf8
from maect.recipes import Pixels

log = logging.getLogger(__name__)

IMAGES_AT_ONCE = 64
_BLOCK = 512
_QUALITY = 95
_PLAN_KEYS = ("split", "kind", "class_names", "ignored", "excluded", "options", "listings")
"""Keys of plan.json that index.json repeats."""


def shard(
    source: Path, out: Path, kind: str, shards: int, *, threads: int = 1, **options: Any
) -> int:
    """Write and index a split's shards; return its number of samples.

    Every image is decoded once, to know that it can be. What is finished stays as it is.

    Args:
        options: those of `maect.data.shard_plan.plan_shards`.

    Raises:
        UserError: as `plan_shards`; or `out` holds shards of another plan, another job works there,
            or images are unreadable, which are then listed all together.
    """
    plan = plan_shards(source, kind, out, shards, **options)
    with _lock(out):
        store_plan(out, plan)
        _write_tars(out, plan.record, plan.source, threads)
        return _finish_index(out, plan.record)


def finished_samples(
    out: Path,
    kind: str,
    shards: int,
    *,
    only: Path | None = None,
    skip_unreadable: bool = False,
    shorter_side: int | None = None,
    pixels: Pixels | None = None,
    **_: Any,
) -> int | None:
    """Return the number of samples of finished shards if such settings made them, else None.

    Neither images nor lists are read: finished shards do without them.
    """
    if not all((out / name).exists() for name in ("plan.json", "index.json")):
        return None
    plan = read_record(out / "plan.json")
    made_by = (plan["kind"], plan["shards"], plan["options"], "only" in plan)
    if made_by != (kind, shards, stored_options(shorter_side, pixels), only is not None):
        return None
    if skip_unreadable != ("skip_unreadable" in plan):
        unreadable = read_record(out / "index.json").get("unreadable")
        if unreadable:
            return None
    if not all(_is_finished(out, plan, number) for number in range(plan["shards"])):
        return None
    with _lock(out):
        return _finish_index(out, plan)


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Keep other jobs out of a folder of shards; UserError if one works there."""
    folder = out / "parts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{out}: another maect shard is at work here; wait for it or choose another folder"
            ) from None
        except OSError:
            log.debug("%s: mounted without locks", out)
        yield


# --- Tars -----------------------------------------------------------------------------------------


class _UnreadableImagesError(Exception):
    """Images of a shard cannot be read.

    Attributes:
        faults: name and reason of each, with a tab between.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults


def _write_tars(out: Path, plan: dict[str, Any], source: ImageSource, threads: int) -> None:
    """Write every shard that is not finished.

    As long as there is no index, a shard is finished only if its images' files are as they were.
    """
    indexed = (out / "index.json").exists()
    faults: list[str] = []
    for number in range(plan["shards"]):
        if _is_finished(out, plan, number) and (
            indexed or _files_are_as_read(out, plan, source, number)
        ):
            continue
        try:
            _write_tar(out, plan, source, number, threads)
        except _UnreadableImagesError as error:
            faults += error.faults
    if faults:
        raise _unreadable_error(out, plan, faults)


def _record_path(out: Path, number: int) -> Path:
    """Return the record that a shard is finished; beside it, as .npz, is its part of the index."""
    return out / "parts" / f"{number:06d}.json"


def _is_finished(out: Path, plan: dict[str, Any], number: int) -> bool:
    """Return whether a shard of the plan is complete."""
    path = _record_path(out, number)
    if not (path.exists() and path.with_suffix(".npz").exists()):
        return False
    record = read_record(path)
    if (record["listing"], record["options"]) != (plan["listings"][number], plan["options"]):
        return False
    if record.get("unreadable") and "skip_unreadable" not in plan:
        return False
    tar = out / shard_name(plan["split"], number)
    return tar.exists() and tar.stat().st_size == record["size"]


def _files_are_as_read(out: Path, plan: dict[str, Any], source: ImageSource, number: int) -> bool:
    """Return whether the files of a finished shard's images are those that it was made of."""
    _, entries = read_listing(out, plan, number)
    now = files_digest(source, [entry for _, entry in entries])
    return bool(read_record(_record_path(out, number)).get("files") == now)


def _write_tar(
    out: Path, plan: dict[str, Any], source: ImageSource, number: int, threads: int
) -> None:
    """Write a shard and its part of the index.

    Raises:
        _UnreadableImagesError: nothing is written, unless such images are to be skipped.
    """
    start, entries = read_listing(out, plan, number)
    listed = [entry for _, entry in entries]
    files = files_digest(source, listed)  # before they are read: an edit meanwhile is seen
    source.read_ahead(listed, out)
    images = zip(entries, ready_images(source, listed, plan["options"], threads), strict=True)
    skip = "skip_unreadable" in plan
    part = _Part(start, number)
    tar = out / shard_name(plan["split"], number)
    with atomic_write(tar) as temporary, open(temporary, "wb") as stream:
        file = _TarFile(stream)
        part.add_images(images, file, skip)
        file.finish()
    path = _record_path(out, number)
    part.write_rows(path.with_suffix(".npz"))
    record = {
        "file": tar.name,
        "count": len(part.rows),
        "size": file.size,
        "sha256": file.digest.hexdigest(),
        "listing": plan["listings"][number],
        "options": plan["options"],
        "files": files,
    }
    if part.faults:
        record["unreadable"] = part.faults
    write_record(path, record | merged(part.facts))


@dataclass
class _Part:
    """Part of the index of one shard.

    Attributes:
        start: id of the shard's first image, counted with those that are unreadable.
        number: of the shard.
        rows: columns `COLUMNS` of each sample.
        contents: sha256 of each sample.
        checksums: CRC-32 of each image's bytes.
        faults: name and reason of each unreadable image, with a tab between.
    """

    start: int
    number: int
    rows: list[tuple[int, ...]] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add_images(
        self,
        images: Iterator[tuple[tuple[str, Entry], Ready | str]],
        tar: "_TarFile",
        skip: bool,
    ) -> None:
        """Add the images of a shard, in order, also to its tar.

        Args:
            images: key and entry of each, and the image or why it is unreadable.
            skip: leave unreadable images out; else `_UnreadableImagesError` names all of them.
        """
        for position, ((key, entry), image) in enumerate(images):
            if isinstance(image, str):
                self.faults.append(f"{as_utf8(entry.name)}\t{image}")
            elif skip or not self.faults:
                sample = self.start + position
                offset = tar.add(f"{key}.{image.extension}", image.data)
                if entry.label != UNLABELLED:
                    tar.add(f"{key}.cls", str(entry.label).encode())
                size = len(image.data)
                row = (sample, self.number, offset, size, entry.label, image.width, image.height)
                self.rows.append(row)
                self.contents.append(content_hash(key, entry.label, image.data, image.turned))
                self.checksums.append(isal_zlib.crc32(image.data))
                self.facts.append(image.facts)
        if self.faults and not skip:
            raise _UnreadableImagesError(self.faults)

    def write_rows(self, path: Path) -> None:
        """Write rows, sha256 and CRC-32 as arrays."""
        rows = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        content = np.frombuffer(b"".join(self.contents), np.uint8).reshape(-1, 32)
        with atomic_write(path) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, rows=rows, content=content, crc32=np.array(self.checksums, np.uint32))


def ready_images(
    source: ImageSource, entries: Sequence[Entry], options: dict[str, Any], threads: int
) -> Iterator[Ready | str]:
    """Yield the images in order, or why one is unreadable; keep a bounded number in memory.

    Args:
        options: those of plan.json that change an image's bytes.
    """
    side: int = options.get("shorter_side") or sys.maxsize
    pixels = Pixels.of_shards(options)

    def read(entry: Entry) -> Ready | str:
        try:
            ready = make_ready(_read_bytes(source, entry), pixels)
            if min(ready.width, ready.height) > side:
                return _recompress(ready, side)
            return ready
        except (UnreadableError, OSError) as error:
            return reason(error)
        except MemoryError:
            raise UserError(
                f"{source.path}: {entry.name}: too little memory to decode it; end other programs, "
                "use fewer --threads, or `exclude` it"
            ) from None

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for i in range(0, len(entries), IMAGES_AT_ONCE):
            yield from pool.map(read, entries[i : i + IMAGES_AT_ONCE])


def _read_bytes(source: ImageSource, entry: Entry) -> bytes:
    """Read an image's bytes.

    Raises:
        OSError: the file itself is at fault.
        UserError: the file system fails, also when asked again; the file may be sound.
    """
    try:
        return source.read(entry)
    except OSError as error:
        if not error.errno or error.errno in {*FINAL, errno.EACCES, errno.EPERM}:
            raise
    try:
        return with_retries(source.read, entry)
    except OSError as error:
        raise UserError(
            f"{source.path}: {entry.name}: {reason(error)}; start again, or `exclude` it"
        ) from None


def _recompress(ready: Ready, side: int) -> Ready:
    """Return an image as an upright JPEG whose shorter side has `side` pixels."""
    picture = upright_rgb(ready)
    short = min(ready.width, ready.height)
    width = round(ready.width * side / short)
    height = round(ready.height * side / short)
    stream = io.BytesIO()
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    resized.save(stream, "JPEG", quality=_QUALITY, subsampling=0)
    data = stream.getvalue()
    facts = {name: fact for name, fact in ready.facts.items() if name != TURNED}
    return Ready(data, "jpg", width, height, facts)


def content_hash(key: str, label: int, data: bytes, turned: bool) -> bytes:
    """Return the sha256 of a sample, with `data` its image's file."""
    mark = "\0turned" if turned else ""
    text = f"{key}\0{label}\0".encode() + hashlib.sha256(data).digest() + mark.encode()
    return hashlib.sha256(text).digest()


class _TarFile:
    """A tar that is written member by member, with its size in bytes and sha256 so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def add(self, name: str, data: bytes) -> int:
        """Append a file whose header has nothing but name and size; return the data's offset."""
        header = tarfile.TarInfo(name)
        header.size = len(data)
        self._write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict"))
        offset = self.size
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return offset

    def finish(self) -> None:
        """Append the blocks of zeros that end a tar."""
        self._write(bytes(2 * _BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _unreadable_error(out: Path, plan: dict[str, Any], faults: list[str]) -> UserError:
    """List unreadable images in a file; return the error that names it and the first three."""
    report = out / "unreadable.txt"
    write_text(report, "".join(f"{fault}\n" for fault in faults))
    shown = ", ".join(_described(fault) for fault in faults[:3])
    more = ", …" if len(faults) > 3 else ""
    unlist = f", and their names from {plan['only']}," if "only" in plan else ""
    return UserError(
        f"{counted(len(faults), 'unreadable image')}: {shown}{more}; "
        f"all are listed in {report}. Repair them; or have them left out: skip_unreadable: true in "
        f"an experiment, --skip-unreadable of maect shard; or remove them{unlist} and have the "
        f"folder listed again: rm -r {shlex.quote(str(out))}"
    )


def _described(fault: str) -> str:
    name, _, why = fault.partition("\t")
    return f"{name} ({why})"


# --- Index ----------------------------------------------------------------------------------------


def _finish_index(out: Path, plan: dict[str, Any]) -> int:
    """Index finished shards, unless that is done; return the number of samples."""
    if not _is_indexed(out, plan):
        _write_index(out, plan)
    index = open_index(out)
    write_pixels(index)
    unreadable = index.record.get("unreadable")
    if unreadable:
        images = counted(len(unreadable), "unreadable image")
        log.warning("%s: left out: %s, see its index.json", out, images)
    said = warning(index.record, Pixels.of_shards(plan["options"]))
    if said:
        log.warning("%s: %s", out, said)
    # Left by jobs that were killed, or that named unreadable images, repaired since: where images
    # are left out, that list may be the one that names them.
    left_out = plan["excluded"] or plan.get("gone")
    for pattern in (".*.tmp", "parts/.*.tmp", *([] if left_out else ["unreadable.txt"])):
        for leftover in out.glob(pattern):
            leftover.unlink(missing_ok=True)
    return index.n


def _is_indexed(out: Path, plan: dict[str, Any]) -> bool:
    """Return whether the index is that of the finished shards."""
    if not all((out / name).exists() for name in ("index.json", "index.npy", "keys.txt")):
        return False
    index = read_record(out / "index.json")
    if any(index.get(name) != plan.get(name) for name in _PLAN_KEYS):
        return False
    # An edited image may have been written to a shard that was lost.
    records = [read_record(_record_path(out, number)) for number in range(plan["shards"])]
    if [r["sha256"] for r in records] != [s["sha256"] for s in index["shards"]]:
        return False
    try:
        open_index(out)
    except UserError:
        return False
    return True


def _write_index(out: Path, plan: dict[str, Any]) -> None:
    """Merge the parts of the finished shards to index.npy, keys.txt and, last, index.json."""
    records = [read_record(_record_path(out, number)) for number in range(plan["shards"])]
    n = sum(record["count"] for record in records)
    if not n:
        raise UserError(f"{out}: none of {plan['n']} images can be read; index.json is not made")
    digest = hashlib.sha256("\n".join(plan["class_names"]).encode())
    keys: list[str] = []
    checksums: list[NDArray[np.uint32]] = []
    with atomic_write(out / "index.npy") as temporary:
        # Opened by name with the suffix that NumPy would otherwise append.
        rows = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.int64, shape=(n, len(COLUMNS))
        )
        for number, record in enumerate(records):
            start, entries = read_listing(out, plan, number)
            part, content, crc32 = _read_part(out, plan, number, record["count"])
            first, end = len(keys), len(keys) + len(part)
            rows[first:end] = part
            rows[first:end, ID] = np.arange(first, end)  # without gaps where images are left out
            keys += [entries[i][0] for i in (part[:, ID] - start).tolist()]
            digest.update(content.tobytes())
            checksums.append(crc32)
        rows.flush()
    write_text(out / "keys.txt", "".join(f"{key}\n" for key in keys))
    with atomic_write(out / CHECKSUMS) as temporary, open(temporary, "wb") as file:
        np.save(file, np.concatenate(checksums))
    index = {
        "digest": digest.hexdigest(),
        "index_sha256": sha256_file(out / "index.npy"),
        "keys_sha256": sha256_file(out / "keys.txt"),
        "n": n,
        "crc32_sha256": sha256_file(out / CHECKSUMS),
        **{name: plan[name] for name in _PLAN_KEYS},
    }
    if "unlisted" in plan:
        index["unlisted"] = plan["unlisted"]
    unreadable = [_described(fault) for record in records for fault in record.get("unreadable", [])]
    unreadable += [f"{name} (gone)" for name in plan.get("gone", [])]
    if unreadable:
        index["unreadable"] = unreadable
    facts = merged(records)
    pixels = Pixels.of_shards(plan["options"])
    # Where no image was turned or has other channels, nothing is special about reading them.
    if "turned" in facts or pixels.channels != 3:
        index["pixels"] = pixels.model_dump(mode="json")
    index |= facts
    shards = [{name: r[name] for name in ("file", "count", "size", "sha256")} for r in records]
    write_record(out / "index.json", index | {"shards": shards})


def _read_part(
    out: Path, plan: dict[str, Any], number: int, n: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint32]]:
    """Read a shard's rows of the index, sha256 of its `n` samples [n, 32] and CRC-32 [n]."""
    path = _record_path(out, number).with_suffix(".npz")
    try:
        with np.load(path) as part:
            rows = part["rows"]
            content = part["content"]
            crc32 = part["crc32"]
        if (rows.shape, content.shape, crc32.shape) != ((n, len(COLUMNS)), (n, 32), (n,)):
            raise ValueError(f"{len(rows)} rows for {n} images")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        tar = out / shard_name(plan["split"], number)
        raise UserError(f"{path}: damaged ({error}); delete it and {tar} and shard again") from None
    return rows, content, crc32
