"""Copies a split's shards to storage of the node, once per node, before training reads them."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from maect.data.index import open_index
from maect.errors import UserError
from maect.files import atomic_write


def stage(directory: Path, storage: Path | None = None) -> Path:
    """A folder on node-local storage with the same split; every process of a node may call it.

    The first caller copies, the others wait; what is already there is not copied again.

    Args:
        directory: folder of a split's shards.
        storage: node-local folder, `$TMPDIR` by default.

    Returns:
        The folder to open instead.

    Raises:
        UserError: no storage, too little room, or a copy failed.
    """
    index = open_index(directory)
    if storage is None:
        if "TMPDIR" not in os.environ:
            raise UserError("staging: TMPDIR is not set; name the node's storage or do not stage")
        storage = Path(os.environ["TMPDIR"])
    name = hashlib.sha256(str(directory.resolve()).encode() + index.digest.encode()).hexdigest()
    out = storage / f"maect-{name[:16]}" / "split"
    out.mkdir(parents=True, exist_ok=True)
    files = [directory / name for name in ("index.npy", "keys.txt")] + list(index.shards)
    with open(out.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [path for path in files if not _copied(path, out / path.name)]
        needed = sum(path.stat().st_size for path in missing)
        free = shutil.disk_usage(out).free
        if needed > free:
            raise UserError(f"{storage}: {needed >> 20} MiB to stage, {free >> 20} MiB free")
        for path in missing:
            with atomic_write(out / path.name) as temporary:
                shutil.copyfile(path, temporary)
        if not (out / "index.json").exists():
            with atomic_write(out / "index.json") as temporary:
                record = (directory / "index.json").read_text(encoding="utf-8")
                temporary.write_text(_flat(record, index.record["shards"]), encoding="utf-8")
    open_index(out)
    return out


def _copied(source: Path, copy: Path) -> bool:
    return copy.exists() and copy.stat().st_size == source.stat().st_size


def _flat(record: str, shards: list[dict[str, str]]) -> str:
    """A view names shards in other folders; the copies lie side by side."""
    for shard in shards:
        record = record.replace(f'"{shard["file"]}"', f'"{Path(shard["file"]).name}"')
    return record
