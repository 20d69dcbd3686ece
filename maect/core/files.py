"""Files that are either complete or not there (temporary name, fsync, rename), and their hashes."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maect.core.errors import UserError

UMASK = os.umask(0)
os.umask(UMASK)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success make it durable and rename it to `path`.

    On an exception the temporary file is removed and `path` keeps what it held before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pid alone is not unique across the nodes of a shared file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        # safetensors makes files that nobody else in a project may read.
        os.chmod(temporary, 0o666 & ~UMASK)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_path(path: str | Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON mapping that others may be writing or removing; {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_sha256(path: Path) -> str:
    """sha256 of a file that a run left.

    Raises:
        UserError: it is missing, or not the one that the run's record, `run.json`, promises.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; its run is not finished")
    actual = sha256_file(path)
    record = path.parent / "run.json"
    promised = read_json(record).get("sha256", {}) if record.exists() else {}
    if promised.get(path.name, actual) != actual:
        raise UserError(f"{path}: damaged (its checksum is not that in run.json)")
    return actual


def json_lines(path: Path, tail: int | None = None, strict: bool = False) -> list[dict[str, Any]]:
    """Entries of a file with one JSON object a line, oldest first; [] without a file.

    Args:
        path: the file.
        tail: read only so many bytes at its end; a line that they cut is left out.
        strict: refuse a line that is not JSON; otherwise it ends the entries, since a kill may have
            cut off the last one.

    Raises:
        UserError: such a line, named.
    """
    try:
        with open(path, "rb") as file:
            start = max(0, path.stat().st_size - tail) if tail is not None else 0
            file.seek(start)
            lines = file.read().splitlines()
    except OSError:
        return []
    entries = []
    for number, line in enumerate(lines[1 if start else 0 :], start=1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            if strict:
                raise UserError(f"{path}:{number}: not JSON; is the file damaged?") from None
            break
    return entries
