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
MARK = 13
"""Characters that tell keys of one stem apart: a dash and twelve hexadecimal digits."""


def shard_name(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:06d}.tar"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end of the block, all at once."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def key_of(name: str, taken: bool = False) -> str:
    """Return a sample's name in its tar: its image's name as far as webdataset allows.

    Args:
        name: may lack folder and extension, as in a list of names.
        taken: whether another image has the plain key.
    """
    folder, _, base = name.rpartition("/")
    # webdataset ends the key at the first dot; a sample's members must share it.
    stem = (base.rpartition(".")[0] or base).replace(".", "_")
    key = f"{folder}/{stem}" if folder else stem
    key = "".join(c if c.isprintable() and c != "\\" else "_" for c in key)
    if taken or len(key.encode("utf-8", "replace")) > KEY_BYTES:
        mark = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[: MARK - 1]
        short = key.encode("utf-8", "replace")[: KEY_BYTES - MARK].decode("utf-8", "ignore")
        key = f"{short}-{mark}"
    return key
