"""Copy a split's shards to storage of the node, once per node, before training reads them."""

import fcntl
import hashlib
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import NodeError, UserError
from maect.core.files import (
    atomic_write,
    check_literal_path,
    seek_record,
    sha256_file,
    write_record,
)
from maect.core.owners import private_folder
from maect.data.index import CHECKSUMS, Index, open_index
from maect.data.pixels import pixels_files

_COPIES_AT_ONCE = 4  # one stream alone does not fill a parallel file system


def stage(directory: Path, storage: str) -> Path:
    """Return a folder on node-local storage with the same split, for all processes of a node.

    The first caller copies, the others wait. Files that are copied already stay.

    Args:
        storage: node-local folder, or the name of this node's environment variable that holds it,
            such as TMPDIR; variables and `~` in a folder are filled in here, on the node.

    Raises:
        UserError: no such storage, or others can write there what would be read.
        NodeError: too little room, or a copy failed.
    """
    parent = _storage_folder(storage)
    index = open_index(directory)
    identity = f"{directory.resolve()} {index.digest} {index.record['index_sha256']}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    # One for each user: whoever can write there decides on which images a run is trained.
    out = parent / f"maect-{os.geteuid()}-{name}"
    try:
        private_folder(out)
        with open(out / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _copy(index, out)
    except OSError as error:
        fault = f"{socket.gethostname()}: cannot stage {directory} to {out}: {error.strerror}"
        raise NodeError(f"{fault}; choose another --stage-to, or none") from None
    return out


def _storage_folder(storage: str) -> Path:
    """Return the folder on this node that `storage` names."""
    text = f"${storage}" if "/" not in storage and "$" not in storage else storage
    filled = os.path.expanduser(os.path.expandvars(text))
    if "$" in filled or not filled:
        raise UserError(f"staging to {storage}: not set on {socket.gethostname()}")
    if not os.path.isabs(filled) or not os.path.isdir(filled):
        raise UserError(f"staging to {filled}: no such folder on {socket.gethostname()}")
    check_literal_path(Path(filled))
    return Path(filled)


def _copy(index: Index, out: Path) -> None:
    """Copy the index and shards of a split that are not copied yet."""
    record = index.record
    pixels = pixels_files(index)
    checksums = {
        index.directory / "index.npy": record["index_sha256"],
        index.directory / CHECKSUMS: record["crc32_sha256"],
        pixels[0]: seek_record(pixels[1]).get("sha256"),
    }
    beside = [index.directory / "keys.txt", pixels[1], *checksums]
    given = [_File(path, path.name, checksums.get(path)) for path in beside if path.exists()]
    for path, shard in zip(index.shards, record["shards"], strict=True):
        given.append(_File(path, path.name, shard["sha256"], is_shard=True))
    missing = [file for file in given if not file.is_copied(out)]
    needed = sum(file.path.stat().st_size for file in missing)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise NodeError(
            f"{socket.gethostname()}: {index.directory} needs {needed >> 20} MiB more in {out}, "
            f"where {free >> 20} MiB are free; choose another --stage-to, or none"
        )
    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        list(pool.map(lambda file: file.copy(out), missing))
    # A view names shards in other folders; the copies lie side by side.
    pairs = zip(record["shards"], index.shards, strict=True)
    copies = record | {"shards": [{**shard, "file": path.name} for shard, path in pairs]}
    if seek_record(out / "index.json") != copies:
        write_record(out / "index.json", copies)


@dataclass(frozen=True)
class _File:
    """A file to copy.

    Attributes:
        sha256: that the original has by its record; of a file without one, what it has now.
        is_shard: its images are compared with their checksums when they are read.
    """

    path: Path
    name: str
    sha256: str | None
    is_shard: bool = False

    def is_copied(self, out: Path) -> bool:
        """Return whether a copy from before is the same."""
        copy = out / self.name
        if not copy.exists() or copy.stat().st_size != self.path.stat().st_size:
            return False
        return self.is_shard or sha256_file(copy) == (self.sha256 or sha256_file(self.path))

    def copy(self, out: Path) -> None:
        """Copy; raise NodeError if the copy differs from the original's record."""
        with atomic_write(out / self.name) as temporary:
            shutil.copyfile(self.path, temporary)
            if self.sha256 is not None and sha256_file(temporary) != self.sha256:
                raise NodeError(
                    f"{socket.gethostname()}: {self.path}: its copy in {out} has another checksum "
                    "than its record; damaged there or here? `maect shard --verify` says"
                )
