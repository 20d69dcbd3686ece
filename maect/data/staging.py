"""Copies a split's shards to storage of the node, once per node, before training reads them."""

import fcntl
import hashlib
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maect.core.errors import NodeError, UserError
from maect.core.files import atomic_write, write_record
from maect.data.index import CHECKSUMS, Index, open_index
from maect.data.pixels import pixels_files

_COPIES_AT_ONCE = 4  # one stream alone does not fill a parallel file system


def stage(directory: Path, storage: str) -> Path:
    """A folder on node-local storage with the same split; every process of a node may call it.

    The first caller copies, the others wait; what is already there is not copied again.

    Args:
        directory: folder of a split's shards.
        storage: node-local folder, or the name of this node's environment variable that holds it,
            such as TMPDIR; variables and `~` in a folder are filled in here, on the node.

    Returns:
        The folder to open instead.

    Raises:
        UserError: no such storage.
        NodeError: too little room, or a copy failed.
    """
    parent = _folder(storage)
    index = open_index(directory)
    identity = f"{directory.resolve()} {index.digest} {index.record['index_sha256']}"
    out = parent / f"maect-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    try:
        out.mkdir(exist_ok=True)
        with open(out / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _copy(index, out)
    except OSError as error:
        fault = f"{socket.gethostname()}: cannot stage {directory} to {out}: {error.strerror}"
        raise NodeError(f"{fault}; choose another --stage-to, or none") from None
    return out


def _folder(storage: str) -> Path:
    """Where to, on this node."""
    text = f"${storage}" if "/" not in storage and "$" not in storage else storage
    filled = os.path.expanduser(os.path.expandvars(text))
    if "$" in filled or not filled:
        raise UserError(f"staging to {storage}: not set on {socket.gethostname()}")
    if not os.path.isabs(filled) or not os.path.isdir(filled):
        raise UserError(f"staging to {filled}: no such folder on {socket.gethostname()}")
    return Path(filled)


def _copy(index: Index, out: Path) -> None:
    beside = (*pixels_files(index), index.directory / CHECKSUMS)
    files = [index.directory / name for name in ("index.npy", "keys.txt")]
    files += [path for path in beside if path.exists()]
    shards = [path.name for path in index.shards]
    if len(set(shards)) < len(shards):  # a webdataset's, in several folders
        shards = [f"{number:06d}-{name}" for number, name in enumerate(shards)]
    names = [(path, path.name) for path in files] + [*zip(index.shards, shards, strict=True)]
    missing = [(path, name) for path, name in names if not _is_copied(path, out / name)]
    needed = sum(path.stat().st_size for path, _ in missing)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise NodeError(
            f"{socket.gethostname()}: {index.directory} needs {needed >> 20} MiB more in {out}, "
            f"where {free >> 20} MiB are free; choose another --stage-to, or none"
        )

    def copy(given: tuple[Path, str]) -> None:
        path, name = given
        with atomic_write(out / name) as temporary:
            shutil.copyfile(path, temporary)

    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        list(pool.map(copy, missing))
    if missing or not (out / "index.json").exists():
        # A view names shards in other folders; the copies lie side by side.
        told = zip(index.record["shards"], shards, strict=True)
        copies = [{**shard, "file": name} for shard, name in told]
        write_record(out / "index.json", index.record | {"shards": copies})


def _is_copied(source: Path, copy: Path) -> bool:
    return copy.exists() and copy.stat().st_size == source.stat().st_size
