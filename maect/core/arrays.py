"""Named arrays in a safetensors file whose metadata has a checksum of all of it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maect.core.errors import UserError
from maect.core.files import CHECKSUM, atomic_write, check_file, with_retries

Arrays = Mapping[str, NDArray[Any]]


def write_arrays(path: Path, arrays: Arrays, texts: Mapping[str, str]) -> None:
    """Write arrays and texts atomically, with their checksum."""
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with atomic_write(path) as temporary:
        save_file(plain, temporary, {**texts, CHECKSUM: _checksum(plain, texts)})
        sort_metadata(temporary)


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a file of `write_arrays`: UserError if damaged, OSError if missing."""
    try:
        arrays, texts = with_retries(_read, path)
    except SafetensorError as error:
        raise UserError(f"{path}: damaged, or not a safetensors file ({error})") from None
    if texts.pop(CHECKSUM, None) != _checksum(arrays, texts):
        raise UserError(f"{path}: damaged (its checksum differs)")
    return arrays, texts


def seek_arrays(path: Path, *needed: str) -> tuple[dict[str, NDArray[Any]], dict[str, str]] | None:
    """Return the content of a file of `write_arrays`; None if it is missing or damaged.

    Likewise if one of the arrays `needed` is not in it: another version wrote it.
    """
    try:
        arrays, texts = read_arrays(path)
    except (UserError, OSError):
        return None
    return (arrays, texts) if arrays.keys() >= set(needed) else None


def sort_metadata(path: Path) -> None:
    """Sort the metadata in a file's header, which safetensors writes in a random order.

    An encoder's checksum is part of the identity of the runs that start from it. The header is JSON
    behind eight bytes of its length, and may end with spaces.
    """
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise ValueError(f"{path}: header grew from {length} to {len(text)} bytes")
        file.seek(8)
        file.write(text.ljust(length))


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    check_file(path)
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _checksum(arrays: Arrays, texts: Mapping[str, str]) -> str:
    ordered = sorted(arrays.items())
    about = [[name, str(array.dtype), array.shape] for name, array in ordered]
    hashed = hashlib.sha256(json.dumps([about, dict(sorted(texts.items()))]).encode())
    for _, array in ordered:
        hashed.update(array.data)
    return hashed.hexdigest()
