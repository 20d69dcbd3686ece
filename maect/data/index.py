"""The index of a sharded split: where each sample's bytes are, read without scanning a tar.

Files that differ from their record raise `UserError`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from maect.core.errors import UserError
from maect.core.files import open_file, read_record, sha256_file, with_retries
from maect.core.owners import refuse_public
from maect.recipes import Pixels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.data.native import Images

CHECKSUMS = "crc32.npy"
COLUMNS = ("id", "shard", "offset", "size", "label", "width", "height")
ID, SHARD, OFFSET, SIZE, LABEL, WIDTH, HEIGHT = range(len(COLUMNS))
_BLOCK = 512
_OPEN_FILES = 256


class _Descriptor:
    """An open file that closes itself when the last reader lets go of it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        number = getattr(self, "number", -1)
        if number >= 0:
            os.close(number)


@dataclass(frozen=True)
class Index:
    """A sharded split. `rows` is int64 [n, 7] with the columns `COLUMNS`, memory-mapped."""

    directory: Path
    rows: NDArray[np.int64]
    class_names: tuple[str, ...]
    digest: str
    """Identity of the content: keys, labels and image bytes in order, however they are sharded."""
    shards: tuple[Path, ...]
    record: dict[str, Any] = field(repr=False)
    checksums: NDArray[np.uint32] = field(repr=False)
    """CRC-32 of each image's bytes by sample id, [samples of the tars]."""
    _open: _lru_cache_wrapper[_Descriptor] = field(repr=False)
    """Opens a shard, by its number; those used last are kept open, for all threads."""

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.rows)

    @property
    def reading(self) -> dict[str, Any]:
        """Return how files of such images are read (`Pixels.reading`)."""
        return Pixels.of_shards(self.record.get("options", {})).as_seen.reading

    @property
    def channels(self) -> int:
        """Return the number of channels of every image."""
        return self.record.get("pixels", {}).get("channels", 3)

    def check_channels(self, channels: int) -> None:
        """Refuse images of another number of channels."""
        if self.channels != channels:
            raise UserError(
                f"{self.directory}: images of {self.channels} channels, where {channels} are "
                "expected; see `pixels` of the data set"
            )

    @property
    def turned(self) -> bool:
        """Return whether images have to be rotated upright as they are read."""
        return "pixels" in self.record and bool(self.record.get("turned"))

    @property
    def view_of(self) -> str | None:
        """Return the digest of the split whose view this is and whose ids it has, or None."""
        digest: str | None = self.record.get("view_of", {}).get("digest")
        return digest

    @property
    def plain(self) -> bool:
        """Return whether every stored image is an RGB picture."""
        return "pixels" not in self.record

    def render(self, i: int, geometries: NDArray[np.int32], out: Images) -> None:
        """Decode a sample once and resample every view into `out` (`maect.data.decode.render`).

        Args:
            geometries: [v, 8], of the upright image.
            out: uint8 [C, S, S] of each view, whose sizes S may differ; overwritten.
        """
        from maect.data.convert import render_ready
        from maect.data.decode import render

        data = self.read(i)
        if self.plain:
            render(data, geometries, out)
        else:
            render_ready(data, geometries, out, self.turned)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels, int64 [n], -1 where unlabelled; a view on the mapped rows."""
        return self.rows[:, LABEL]

    @property
    def contents(self) -> NDArray[np.uint32]:
        """CRC-32 of each sample's bytes, uint32 [n]: equal images have equal ones."""
        return self.checksums[self.rows[:, ID]]

    def key(self, i: int) -> str:
        """Return a sample's name in its tar, without extension."""
        row = self.rows[i]
        file = self._open(int(row[SHARD]))
        header = os.pread(file.number, 100, int(row[OFFSET]) - _BLOCK)
        # It names the sample in messages about damage, too, so the header may be anything.
        name = header.rstrip(b"\0").decode("utf-8", "backslashreplace")
        if not name.isprintable():
            name = ascii(name)[1:-1]
        folder, _, base = name.rpartition("/")
        return f"{folder}/{base.split('.')[0]}" if folder else base.split(".")[0]

    def read(self, i: int) -> bytes:
        """Read the original bytes of a sample's image.

        Raises:
            UserError: the shard is gone or too short, or the bytes have changed.
            OSError: the file system fails; another job may succeed.
        """
        sample, shard, offset, size, *_ = self.rows[i].tolist()
        path = self.shards[shard]
        try:
            data = with_retries(self._bytes, shard, offset, size)
        except FileNotFoundError as error:
            raise UserError(f"{path}: cannot read sample {i}: {error.strerror}") from None
        if len(data) != size:
            raise UserError(f"{path}: ends inside sample {i}; check it with maect shard --verify")
        if isal_zlib.crc32(data) != self.checksums[sample]:
            raise UserError(
                f"{path}: sample {i} ({self.key(i)}) is damaged: its checksum has changed since "
                "it was sharded; check the shards with maect shard --verify"
            )
        return data

    def _bytes(self, shard: int, offset: int, size: int) -> bytes:
        """Read `size` bytes of a shard, or fewer at its end."""
        data = b""
        try:
            while len(data) < size:  # a read may legally return less than asked
                file = self._open(shard)
                more = os.pread(file.number, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError:
            self._open.cache_clear()  # a stale handle stays one; who still reads a file keeps it
            raise
        return data

    def undecodable(self, i: int, error: Exception) -> UserError:
        """Return the error for a sample that can no longer be decoded."""
        return UserError(
            f"{self.directory}: cannot decode sample {i} ({self.key(i)}): {error}; "
            "it could when it was sharded: check the shards with maect shard --verify"
        )

    def keys(self) -> list[str]:
        """Read the names of all samples in order from keys.txt; compare it with its checksum."""
        path = self.directory / "keys.txt"
        try:
            with open_file(path) as file:
                data = file.read()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != self.record.get("keys_sha256"):
            raise UserError(
                f"{path}: changed since it was written; delete it and index.json and start again: "
                "both are made again"
            )
        return data.decode().split("\n")[:-1]


def open_index(directory: str | Path) -> Index:
    """Open a split's index and check it against its record, without reading the shards."""
    import numpy as np

    directory = Path(directory)
    if not (directory / "index.json").exists():
        raise UserError(f"{directory}: no index.json; make it with maect shard")
    refuse_public(directory)
    record = read_record(directory / "index.json")
    path = directory / "index.npy"
    try:
        sums = directory / CHECKSUMS
        _check_sha256(path, record["index_sha256"])
        _check_sha256(sums, record["crc32_sha256"])
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = (record["n"], len(COLUMNS))
        shards = tuple(directory / shard["file"] for shard in record["shards"])
        names = tuple(record["class_names"])
        digest = record["digest"]
        checksums = np.asarray(np.load(sums, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory}/index.json: damaged ({error}); shard again") from None
    # A plain view: memory maps of their own class are slow to index.
    rows = np.asarray(mapped)
    if rows.dtype != np.int64 or rows.shape != shape:
        raise UserError(f"{path}: {rows.dtype} {rows.shape} does not match index.json")
    # Rows are picked here and there: reading ahead would cost milliseconds for each.
    mapped._mmap.madvise(mmap.MADV_RANDOM)
    for shard, recorded in zip(shards, record["shards"], strict=True):
        try:
            size = shard.stat().st_size
        except OSError as error:
            raise UserError(f"{shard}: {error.strerror}; named by {directory}/index.json") from None
        if size != recorded.get("size"):
            raise UserError(
                f"{shard}: {size} bytes, {recorded.get('size')} recorded; shard it again"
            )
    opened = lru_cache(_OPEN_FILES)(lambda number: _Descriptor(shards[number]))
    return Index(directory, rows, names, digest, shards, record, checksums, opened)


def _check_sha256(path: Path, sha256: str) -> None:
    if sha256_file(path) != sha256:
        raise UserError(f"{path}: changed since it was written; delete it and run maect shard")
