"""Download public files: resumable, checked, and complete under their final names only.

The catalogue has address, name and, where it is known, sha256 of each file. Of others the hash of
the first download is kept beside the file.
ImageNet-1k itself needs an account and is not here.

By hand, because the common libraries lose what gigabytes over a bad line need: pooch, for one, has
checksums and unpacking, but starts a broken download over and takes a cut one for complete.
"""

import errno
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
_PIECE = 1 << 20
# No name service or no route: waiting will not help.
_HOPELESS = ("Name or service", "name resolution", "unreachable", "refused")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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


def fetch_all(remotes: Iterable[Remote], out: Path, wait: float = 2.0) -> list[Path]:
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
        if not _hash_file(path).exists():  # not before an archive is unpacked
            write_text(_hash_file(path), f"{sha256}  {path.name}\n")
    return fetched


def _download(remote: Remote, path: Path, wait: float) -> None:
    part = path.with_name(f"{path.name}.part")
    failures = 0
    while True:
        before = _size(part)
        try:
            _continue_download(remote.url, part)
            break
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}"
            hopeless = error.code < 500 and error.code != 429
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise UserError(f"{part}: {error.strerror}; make room and try again") from None
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            hopeless = any(word in reason for word in _HOPELESS)
        failures = 0 if _size(part) > before else failures + 1
        if hopeless or failures == _ATTEMPTS:
            raise UserError(
                f"cannot fetch {remote.url}: {reason}. On a machine with internet run `curl -L -o "
                f"{path.name} {remote.url}`, put the file at {path.resolve()} and try again"
            )
        time.sleep(wait * 2 ** max(failures - 1, 0))
    # A wrong file must not be taken for a part to resume from.
    if remote.sha256 is not None and sha256_file(part) != remote.sha256:
        part.unlink()
        _etag_file(part).unlink(missing_ok=True)
        raise UserError(
            f"{remote.url}: sha256 differs from the expected {remote.sha256}; the download was "
            "deleted. Try again; if it stays, the file has changed at its source"
        )
    fsync_path(part)
    part.rename(path)
    _etag_file(part).unlink(missing_ok=True)


def _continue_download(url: str, part: Path) -> None:
    """Continue a download where it stopped, unless the source has changed since."""
    start = _size(part)
    headers = {"User-Agent": "maect"}
    if start and _etag_file(part).exists():
        headers |= {"Range": f"bytes={start}-", "If-Range": _etag_file(part).read_text().strip()}
    else:
        start = 0
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not start:
            raise
        part.unlink()  # asked for bytes behind the end: start over
        return _continue_download(url, part)
    with response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if tag and not tag.startswith("W/"):  # a weak tag cannot vouch for a range
            _etag_file(part).write_text(tag)
        else:
            _etag_file(part).unlink(missing_ok=True)
        received = 0
        with open(part, "ab" if resumed else "wb") as file:
            for piece in iter(lambda: response.read(_PIECE), b""):
                file.write(piece)
                received += len(piece)
    if length is not None and received != int(length):
        raise ConnectionError(f"connection closed after {received} of {length} bytes")


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
    """Unpack beside the archive, under a temporary name until it is complete.

    Only files and folders: without links, names that are checked cannot lead elsewhere.
    """
    temporary = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(temporary)
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    if not (member.isfile() or member.isdir()) or member.size < 0:
                        raise tarfile.TarError(f"{member.name!r} is neither file nor folder")
                    tar.extract(member, temporary, filter="data")
        if not (temporary / folder.name).is_dir():
            raise UserError(f"{archive}: holds no folder {folder.name}")
        (temporary / folder.name).rename(folder)
    except (OSError, *_DAMAGED) as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        cure = "make room" if full else "delete it"
        raise UserError(
            f"{archive}: cannot be unpacked ({reason(error)}); {cure} and try again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _etag_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")
