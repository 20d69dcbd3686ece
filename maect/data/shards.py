"""Shards of a split: planned, written as tars with original bytes, and indexed.

Layout of `out`: SPLIT-000000.tar … (webdataset: KEY.jpg, KEY.cls), index.npy, keys.txt and, last,
index.json; of small images also pixels.npy; plan.json and parts/ belong to the making. Every step
can be killed at any moment and run again: what is finished stays as it is, what is not is made
again. A wrong source, or shards of another plan, raises a `UserError`.
"""

import errno
import fcntl
import hashlib
import io
import logging
import os
import shlex
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from maect.data.convert import Ready, make_ready, upright_rgb
from maect.data.decode import UnreadableError
from maect.data.image_facts import Facts, facts_of, merged, warning
from maect.data.index import CHECKSUMS, COLUMNS, ID, SHARD, open_index
from maect.data.pixels import write_pixels
from maect.data.shard_plan import planned, read_listing, read_plan, store_plan
from maect.data.sources import open_source
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, as_utf8
from maect.recipes import Pixels

log = logging.getLogger(__name__)

_BLOCK = 512
AT_ONCE = 64
_QUALITY = 95
PASSED_ON = ("split", "kind", "class_names", "ignored", "excluded", "options", "listings")
"""What an index has of its plan."""


def shard(
    source: Path, out: Path, kind: str, shards: int, *, threads: int = 1, **options: Any
) -> int:
    """Plan, write and index a split in one go; continues where it was stopped; return its samples.

    Options are those of `plan_shards`. All unreadable images are reported together.
    """
    plan, listings, note = planned(source, kind, out, shards, **options)
    with _locked(out, alone=True):
        store_plan(out, plan, listings, note)
        _write_all(out, plan["shards"], threads)
        return _index(out)


def plan_shards(source: Path, kind: str, out: Path, shards: int, **options: Any) -> dict[str, Any]:
    """List the source, shuffle it and assign every image to a shard. Repeating it changes nothing.

    Args:
        options: split, their name (that of `out` by default); labels of the source, for the kinds
            that take them; only and exclude, text files of names of images to take alone and to
            leave out, one a line; skip_unreadable, to leave out what cannot be read or is no longer
            there, and to list it in the index; shorter_side, to which larger images are
            recompressed (off by default); pixels, as which the images are made ready.

    Raises:
        UserError: wrong source, or `out` holds shards of another plan.
    """
    plan, listings, note = planned(source, kind, out, shards, **options)
    with _locked(out, alone=True):
        store_plan(out, plan, listings, note)
    return plan


def write_shard(out: Path, number: int, *, threads: int = 1) -> Path:
    """Write one planned shard, unless it is finished; every image is decoded once to prove it.

    Returns the tar, or raises a UserError with the names of unreadable images.
    """
    tar = out / shard_name(read_plan(out)["split"], number)
    try:
        with _locked(out, alone=False):
            _write(out, number, threads)
    except _FaultyError as error:
        # A file of its own: other jobs may be writing theirs.
        raise _refusal(out, f"unreadable-{number:06d}.txt", error.faults) from None
    return tar


def finish_index(out: Path, *, threads: int = 1) -> int:
    """Merge the finished shards to index.npy, keys.txt and, last, index.json; return the samples.

    Tars that are indexed where they lie are read here, those that were not yet. Small images are
    decoded once, into pixels.npy (`maect.data.pixels`).
    """
    plan = read_plan(out)
    with _locked(out, alone=True):
        if "tars" in plan:
            _write_all(out, plan["shards"], threads)
        return _index(out)


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
    """Return how many samples a split has that is finished by such settings; else None.

    Images and lists are not read: finished shards do without.
    """
    if not all((out / name).exists() for name in ("plan.json", "index.json")):
        return None
    plan = read_plan(out)
    made = {} if pixels is None else pixels.files
    side = {} if shorter_side is None else {"shorter_side": shorter_side}
    asked = (kind, side | ({"pixels": made} if made else {}), only is not None)
    if asked != (plan["kind"], plan["options"], "only" in plan):
        return None
    if "tars" not in plan and plan["shards"] != shards:
        return None
    if skip_unreadable != ("skip_unreadable" in plan) and read_record(out / "index.json").get(
        "unreadable"
    ):
        return None
    if not all(is_finished(out, number) for number in range(plan["shards"])):
        return None
    with _locked(out, alone=True):
        return _index(out)


def _write_all(out: Path, shards: int, threads: int) -> None:
    """Write what is missing of all shards."""
    faults: list[str] = []
    for number in range(shards):
        try:
            _write(out, number, threads)
        except _FaultyError as error:
            faults += error.faults
    if faults:
        raise _refusal(out, "unreadable.txt", faults)


@contextmanager
def _locked(out: Path, *, alone: bool) -> Iterator[None]:
    """Keep others from the folder: all of them, or those that must be alone there."""
    try:
        (out / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(out / "parts/.lock", "a+"))
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{out}: another maect shard is at work here; wait for it or choose another folder"
            ) from None
        except OSError:
            pass  # mounted without locks, or read-only since all is done
        yield


def _record_path(out: Path, number: int) -> Path:
    """The record that a shard is finished; beside it, as .npz, its part of the index."""
    return out / "parts" / f"{number:06d}.json"


# --- Tars -----------------------------------------------------------------------------------------


class _FaultyError(Exception):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults


def is_finished(out: Path, number: int) -> bool:
    """Return whether a shard of the present plan is complete."""
    plan, path = read_plan(out), _record_path(out, number)
    if not (path.exists() and path.with_suffix(".npz").exists()):
        return False
    record, tar = read_record(path), out / shard_name(plan["split"], number)
    same = (record["listing"], record["options"]) == (plan["listings"][number], plan["options"])
    if record.get("unreadable") and "skip_unreadable" not in plan:
        return False
    return same and ("tars" in plan or (tar.exists() and tar.stat().st_size == record["size"]))


def _write(out: Path, number: int, threads: int) -> None:
    """Write a shard unless it is finished.

    With unreadable images nothing is written, unless they are to be skipped. Of tars that are
    indexed where they lie, only a part of the index is written.
    """
    start, entries = read_listing(out, number)
    if is_finished(out, number):
        return
    plan = read_plan(out)
    pixels, skip = Pixels.of_shards(plan["options"]), "skip_unreadable" in plan
    source = open_source(plan["kind"], Path(plan["source"]), pixels=pixels)
    tar = out / shard_name(plan["split"], number)
    tars = {path: i for i, path in enumerate(plan.get("tars", []))}
    listed = [entry for _, entry in entries]
    rows: list[tuple[int, ...]] = []
    hashes: list[bytes] = []
    checksums: list[int] = []
    faults: list[str] = []
    facts: list[Facts] = []
    with ExitStack() as stack:
        file = None
        if not tars:
            temporary = stack.enter_context(atomic_write(tar))
            file = _Hashed(stack.enter_context(open(temporary, "wb")))
        source.read_ahead(listed, out)
        images = prepare(source, listed, plan["options"], threads)
        for position, ((key, entry), image) in enumerate(zip(entries, images, strict=True)):
            if isinstance(image, str):
                faults.append(f"{as_utf8(entry.name)}\t{image}")
            if isinstance(image, str) or (faults and not skip):
                continue  # read on, to name all of them at once
            if file is None:
                where = tars[str((source.root / entry.path).resolve())], entry.offset
            else:
                where = number, _add(file, f"{key}.{image.extension}", image.data)
                if entry.label != UNLABELLED:
                    _add(file, f"{key}.cls", str(entry.label).encode())
            size = len(image.data)
            rows.append((start + position, *where, size, entry.label, image.width, image.height))
            hashes.append(content_hash(key, entry.label, image.data, image.turned))
            facts.append(facts_of(image))
            checksums.append(isal_zlib.crc32(image.data))
        if faults and not skip:
            raise _FaultyError(faults)
        if file is not None:
            file.write(bytes(2 * _BLOCK))
    parts = _record_path(out, number)
    with atomic_write(parts.with_suffix(".npz")) as temporary, open(temporary, "wb") as stream:
        content = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
        table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        np.savez(stream, rows=table, content=content, crc32=np.array(checksums, np.uint32))
    written = {} if file is None else {"size": file.written, "sha256": file.digest.hexdigest()}
    write_record(
        parts,
        {
            "file": tar.name,
            "count": len(rows),
            **written,
            "listing": plan["listings"][number],
            "options": plan["options"],
            **({"unreadable": faults} if faults else {}),
            **merged(facts),
        },
    )


def prepare(
    source: ImageSource, entries: list[Entry], options: dict[str, Any], threads: int
) -> Iterator[Ready | str]:
    """The images in order, or why one cannot be read; a bounded number in memory."""
    side: int = options.get("shorter_side") or sys.maxsize
    pixels = Pixels.of_shards(options)

    def one(entry: Entry) -> Ready | str:
        try:
            ready = make_ready(_read(source, entry), pixels)
            if source.in_place and ready.converted:
                return "has to be converted, which an index of tars cannot do; unpack them"
            return _recompress(ready, side) if min(ready.width, ready.height) > side else ready
        except (UnreadableError, OSError) as error:
            return reason(error)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for i in range(0, len(entries), AT_ONCE):
            yield from pool.map(one, entries[i : i + AT_ONCE])


def _read(source: ImageSource, entry: Entry) -> bytes:
    """A file's bytes; a UserError if the file system fails: the file itself may be sound."""
    try:
        return source.read(entry)
    except OSError as error:
        if not error.errno or error.errno in {*FINAL, errno.EACCES, errno.EPERM}:
            raise  # the file's own fault
    try:
        return with_retries(source.read, entry)
    except OSError as error:
        raise UserError(
            f"{source.path}: {entry.name}: {reason(error)}; start again, or `exclude` it"
        ) from None


def _recompress(ready: Ready, side: int) -> Ready:
    """A smaller JPEG, upright."""
    picture = upright_rgb(ready)
    short = min(ready.width, ready.height)
    size = (round(ready.width * side / short), round(ready.height * side / short))
    stream = io.BytesIO()
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    resized.save(stream, "JPEG", quality=_QUALITY, subsampling=0)
    return replace(
        ready, data=stream.getvalue(), extension="jpg", width=size[0], height=size[1], turned=False
    )


def content_hash(key: str, label: int, data: bytes, turned: bool) -> bytes:
    """Return the sha256 of a sample, with `data` its image's file."""
    mark = "\0turned" if turned else ""
    text = f"{key}\0{label}\0".encode() + hashlib.sha256(data).digest() + mark.encode()
    return hashlib.sha256(text).digest()


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


def _refusal(out: Path, name: str, faults: list[str]) -> UserError:
    report, listed = out / name, read_plan(out).get("only")
    write_text(report, "".join(f"{fault}\n" for fault in faults))
    first = [fault.partition("\t") for fault in faults[:3]]
    shown = ", ".join(f"{name} ({why})" for name, _, why in first)
    unlist = f", and their names from {listed}," if listed else ""
    return UserError(
        f"{counted(len(faults), 'unreadable image')}: {shown}{', …' if len(faults) > 3 else ''}; "
        f"all are listed in {report}. Repair them; or have them left out: skip_unreadable: true in "
        f"an experiment, --skip-unreadable of maect shard; or remove them{unlist} and have the "
        f"folder listed again: rm -r {shlex.quote(str(out))}"
    )


# --- Index ----------------------------------------------------------------------------------------


def _index(out: Path) -> int:
    plan = read_plan(out)
    missing = [number for number in range(plan["shards"]) if not is_finished(out, number)]
    if missing:
        first = ", ".join(map(str, missing[:5]))
        raise UserError(f"{out}: {len(missing)} shards are not written (number {first} first)")
    if not _is_indexed(out, plan):
        _write_index(out, plan)
    index = open_index(out)
    write_pixels(index)
    if left := index.record.get("unreadable"):
        log.warning(
            "%s: left out: %s, see its index.json", out, counted(len(left), "unreadable image")
        )
    if said := index.record.get("warning"):
        log.warning("%s: %s", out, said)
    # Of steps that were killed, or refused images that have been repaired since.
    for pattern in (".*.tmp", "parts/.*.tmp", "unreadable*.txt"):
        for leftover in out.glob(pattern):
            leftover.unlink(missing_ok=True)
    return index.n


def _write_index(out: Path, plan: dict[str, Any]) -> None:
    records = [read_record(_record_path(out, number)) for number in range(plan["shards"])]
    n = sum(record["count"] for record in records)
    if not n:
        raise UserError(f"{out}: none of {plan['n']} images can be read; index.json is not made")
    digest = hashlib.sha256("\n".join(plan["class_names"]).encode())
    keys: list[str] = []
    contents: list[NDArray[np.uint8]] = []
    checksums: list[NDArray[np.uint32]] = []
    with atomic_write(out / "index.npy") as temporary:
        # Opened by name with the suffix that NumPy would otherwise append.
        rows = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.int64, shape=(n, len(COLUMNS))
        )
        for number, record in enumerate(records):
            start, entries = read_listing(out, number)
            part, content, crc32 = _read_part(out, number, record["count"])
            checksums.append(crc32)
            at = slice(len(keys), len(keys) + len(part))
            digest.update(content.tobytes())
            keys += [entries[i][0] for i in (part[:, ID] - start).tolist()]
            rows[at] = part
            rows[at, ID] = np.arange(at.start, at.stop)  # without gaps where images are left out
            contents.append(content)
        rows.flush()
        shards = _shards(plan, records, rows, np.concatenate(contents))
    write_text(out / "keys.txt", "".join(f"{key}\n" for key in keys))
    with atomic_write(out / CHECKSUMS) as temporary, open(temporary, "wb") as file:
        np.save(file, np.concatenate(checksums))
    if faults := [fault for record in records for fault in record.get("unreadable", [])]:
        faults = [f"{name} ({why})" for name, _, why in (fault.partition("\t") for fault in faults)]
    faults += [f"{name} (gone)" for name in plan.get("gone", [])]
    found = merged(records)
    # Where no image was turned or has other channels, nothing is special about reading them.
    read = Pixels.of_shards(plan["options"])
    special = "turned" in found or read.channels != 3
    write_record(
        out / "index.json",
        {
            "digest": digest.hexdigest(),
            "index_sha256": sha256_file(out / "index.npy"),
            "keys_sha256": sha256_file(out / "keys.txt"),
            "n": n,
            "crc32_sha256": sha256_file(out / CHECKSUMS),
            **{name: plan[name] for name in PASSED_ON},
            **({"unlisted": plan["unlisted"]} if "unlisted" in plan else {}),
            **({"unreadable": faults} if faults else {}),
            **({"in_place": True} if "tars" in plan else {}),
            **({"pixels": read.model_dump(mode="json")} if special else {}),
            **found,
            **({"warning": said} if (said := warning(found, read)) else {}),
            "shards": shards,
        },
    )


def _shards(
    plan: dict[str, Any],
    records: list[dict[str, Any]],
    rows: NDArray[np.int64],
    content: NDArray[np.uint8],
) -> list[dict[str, Any]]:
    """Return the index's entry of each tar; of one that lies elsewhere, its samples' hash."""
    if "tars" not in plan:
        return [{name: r[name] for name in ("file", "count", "size", "sha256")} for r in records]
    shards = []
    for number, path in enumerate(plan["tars"]):
        inside = rows[:, SHARD] == number
        sha256 = hashlib.sha256(content[inside].tobytes()).hexdigest()
        size = os.path.getsize(path)
        shards.append({"file": path, "count": int(inside.sum()), "size": size, "sha256": sha256})
    return shards


def _read_part(
    out: Path, number: int, n: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint32]]:
    """A shard's rows of the index, sha256 of its `n` samples, [n, 32], CRC-32 of their images."""
    path = _record_path(out, number).with_suffix(".npz")
    try:
        with np.load(path) as part:
            rows, content, crc32 = (part[name] for name in ("rows", "content", "crc32"))
        shapes = rows.shape, content.shape, crc32.shape
        if shapes != ((n, len(COLUMNS)), (n, 32), (n,)):
            raise ValueError(f"{len(rows)} rows for {n} images")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        tar = out / shard_name(read_plan(out)["split"], number)
        raise UserError(f"{path}: damaged ({error}); delete it and {tar} and shard again") from None
    return rows, content, crc32


def _is_indexed(out: Path, plan: dict[str, Any]) -> bool:
    if not all((out / name).exists() for name in ("index.json", "index.npy", "keys.txt")):
        return False
    index = read_record(out / "index.json")
    if any(index.get(name) != plan.get(name) for name in PASSED_ON):
        return False
    written = [read_record(_record_path(out, number)) for number in range(plan["shards"])]
    if "tars" not in plan and [r["sha256"] for r in written] != [
        s["sha256"] for s in index["shards"]
    ]:
        return False  # one was written again, of images that were edited
    try:
        open_index(out)
    except UserError:
        return False
    return True
