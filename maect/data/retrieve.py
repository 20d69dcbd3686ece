"""Download public files: continued, checked, and complete under their final names only.

The catalogue has address, name and, where it is known, sha256 of each file. Of others the hash of
the first download is kept beside the file.
ImageNet-1k itself needs an account and is not here.

By hand, because the common libraries lose what gigabytes over a bad line need: pooch, for one, has
checksums and unpacking, but starts a broken download over and takes a cut one for complete.
"""

import http.client
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from maect.core.errors import UserError, entry, reason
from maect.core.files import fsync_path, sha256_file, write_text
from maect.core.yaml_files import parse_yaml
from maect.recipes.few_labels import OFFICIAL

_ATTEMPTS = 5
_TIMEOUT = 60
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError)


@dataclass(frozen=True)
class Remote:
    """A public file: its address, its name here, its hash if known, the folder it unpacks to."""

    url: str
    name: str
    sha256: str | None = None
    unpacks_to: str | None = None


def _remote(url: str, name: str = "", **more: str) -> Remote:
    name = name or url.rpartition("/")[2]
    return Remote(url, name, **{"sha256": OFFICIAL.get(name), **more})


_TEXT = resources.files(__package__).joinpath("catalogue.yaml").read_text(encoding="utf-8")
CATALOGUE: dict[str, tuple[Remote, ...]] = {
    name: tuple(_remote(**file) for file in files)
    for name, files in parse_yaml(_TEXT, "catalogue").items()
}


def retrieve(what: str, out: Path) -> list[Path]:
    """Fetch all files of a name in the catalogue; only check those that exist.

    Returns the files, or the folders that archives were unpacked to. A UserError says what failed.
    """
    return fetch_all(entry(what, CATALOGUE, "data or weights"), Path(out))


def fetch_all(remotes: Iterable[Remote], out: Path, wait: float = 1.0) -> list[Path]:
    """Fetch and unpack files; `wait` seconds before a second attempt, doubling."""
    out.mkdir(parents=True, exist_ok=True)
    fetched = []
    for remote in remotes:
        if remote.unpacks_to is not None and (out / remote.unpacks_to).is_dir():
            fetched.append(out / remote.unpacks_to)
            continue
        path = out / remote.name
        if not path.exists():
            _download(remote, path, wait)
        sha256 = _check_hash(remote, path)
        fetched.append(path if not remote.unpacks_to else _unpack(path, out / remote.unpacks_to))
        write_text(_hash_file(path), f"{sha256}  {path.name}\n")  # once an archive is unpacked
    return fetched


class _PartialFile:
    """A file that is being downloaded; continued as long as its source stays the same."""

    def __init__(self, url: str, path: Path) -> None:
        self.path = path
        self._url = url
        self._tag = ""
        path.write_bytes(b"")

    @property
    def size(self) -> int:
        """Return the bytes that are there."""
        return self.path.stat().st_size

    def receive(self) -> None:
        """Receive the rest; an OSError or HTTPException if the connection breaks."""
        headers = {"User-Agent": "maect"}
        if self.size and self._tag:
            headers |= {"Range": f"bytes={self.size}-", "If-Range": self._tag}
        request = urllib.request.Request(self._url, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            self._tag = "" if tag.startswith("W/") else tag  # a weak one cannot vouch for a range
            before = self.size if response.status == 206 else 0
            with open(self.path, "ab" if before else "wb") as file:
                shutil.copyfileobj(response, file)
            length = response.headers.get("Content-Length")
        received = self.size - before
        if length is not None and received != int(length):
            raise ConnectionError(f"connection closed after {received} of {length} bytes")


def _download(remote: Remote, path: Path, wait: float) -> None:
    part = _PartialFile(remote.url, path.with_name(f"{path.name}.part"))
    failures = 0
    while True:
        before = part.size
        try:
            part.receive()
            break
        except (OSError, http.client.HTTPException) as error:
            failures = 0 if part.size > before else failures + 1
            code = error.code if isinstance(error, urllib.error.HTTPError) else 500
            if failures == _ATTEMPTS or (code < 500 and code != 429):
                raise UserError(
                    f"cannot fetch {remote.url}: {reason(error)}. On a machine with internet run "
                    f"`curl -L -o {path.name} {remote.url}`, put the file at {path.resolve()} and "
                    "try again"
                ) from None
        time.sleep(wait * 2 ** max(failures - 1, 0))
    if remote.sha256 is not None and sha256_file(part.path) != remote.sha256:
        part.path.unlink()
        raise UserError(
            f"{remote.url}: sha256 differs from the expected {remote.sha256}; the download was "
            "deleted. Try again; if it stays, the file has changed at its source"
        )
    fsync_path(part.path)
    part.path.rename(path)


def _hash_file(path: Path) -> Path:
    """Return the file with the hash of a file's first download."""
    return path.with_name(f"{path.name}.sha256")


def _check_hash(remote: Remote, path: Path) -> str:
    """Return a file's hash; UserError if it is neither the known one nor the first download's."""
    actual = sha256_file(path)
    expected = remote.sha256
    cure = ""
    first = _hash_file(path)
    if expected is None and first.exists():
        expected = first.read_text(encoding="utf-8").split()[0]
        cure = f" (if the first download was wrong, delete {first.name}, too)"
    if expected not in (None, actual):
        raise UserError(
            f"{path}: sha256 is {actual}, expected {expected}; delete it and try again{cure}"
        )
    return actual


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack beside the archive, under a temporary name until it is complete."""
    safely = {} if archive.suffix == ".zip" else {"filter": "data"}
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as temporary:
        try:
            shutil.unpack_archive(archive, temporary, **safely)  # type: ignore[arg-type]
            Path(temporary, folder.name).rename(folder)
        except (OSError, *_DAMAGED) as error:
            raise UserError(
                f"{archive}: cannot be unpacked ({reason(error)}); delete it, or make room, and "
                "try again"
            ) from None
    return folder
