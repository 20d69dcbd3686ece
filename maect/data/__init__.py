"""Images, from their source to a training batch."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY_BYTES = 90
"""Longer names do not fit a plain tar header together with their extension."""


def shard_name(split: str, number: int) -> str:
    """File name of a shard."""
    return f"{split}-{number:06d}.tar"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that becomes `folder` at once: far quicker than making each file durable."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def key_of(name: str, taken: bool = False) -> str:
    """Return what a sample is called in its tar: as close to its image's name as webdataset allows.

    A list may leave out folder and extension of `name`; `taken`: by another image.
    """
    folder, _, base = name.rpartition("/")
    # webdataset ends the key at the first dot; a sample's members must share it.
    stem = (base.rpartition(".")[0] or base).replace(".", "_")
    key = f"{folder}/{stem}" if folder else stem
    key = "".join(c if c.isprintable() and c != "\\" else "_" for c in key)
    if taken or len(key.encode("utf-8", "replace")) > KEY_BYTES:
        mark = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        short = key.encode("utf-8", "replace")[: KEY_BYTES - 13].decode("utf-8", "ignore")
        key = f"{short}-{mark}"
    return key
