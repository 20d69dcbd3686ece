"""Files that are complete or not there (temporary name, fsync, rename); records and hashes."""

import errno
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from maect.core.errors import MissingFileError, OtherFormatError, UserError

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
PIPELINE = _PACKAGE / "pipeline" if (_PACKAGE / "pipeline").is_dir() else _PACKAGE.parent
"""Folder of Snakefile, workflow/, cluster_profiles/ and envs/: of the clone, or in the wheel."""

FORMAT = 1
"""Format of all records and resolved files; readable for a major version of maect."""
RUN = "run.json"
"""Completion record of a run, in its folder."""
CHECKSUM = "checksum"
"""Key of a record: sha256 of the rest as JSON with sorted keys."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between tries after a passing error of a file system (ESTALE, EIO, EMFILE)."""
FINAL = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG,
    errno.EFBIG,
}  # fmt: skip
"""Errors that trying again does not change."""
SUMS = ".sha256"
"""Suffix of the file with a table's checksum, as `sha256sum` writes it."""
_TEMPLATE_SIGNS = re.compile(r"[%\\\x00-\x1f\x7f]")
FILE_MODE = 0o664
FOLDER_MODE = 0o775
"""Permissions of new files and folders before the umask: not everybody may write them."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success make it durable and rename it to `path`.

    On an exception the temporary file is removed and `path` keeps what it held before.
    """
    path = Path(path)
    make_folder(path.parent)
    # The pid alone is not unique across the nodes of a shared file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    mode = create_file(temporary)
    try:
        yield temporary
        # safetensors puts a file in its place that nobody else in a project may read.
        os.chmod(temporary, mode)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def create_file(path: Path) -> int:
    """Create an empty file; return its permissions, `FILE_MODE` less the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def need(path: Path, what: str) -> Path:
    """Return `path` if it exists; else raise a UserError that names it as `what`."""
    if not path.exists():
        raise UserError(f"{path}: no such {what}")
    return path


def check_literal_path(path: Path) -> None:
    """Refuse a folder whose full path would be read as a template (UserError).

    Submitit fills in `%t`, `%j` and `%a` anywhere in a path, and sbatch more of them, so files that
    a job executes would lie in another folder, which another user may own. Neither has an escape
    that the other understands.
    """
    full = str(path.absolute())
    if sign := _TEMPLATE_SIGNS.search(full):
        raise UserError(
            f"{full!a}: SLURM or submitit would change {sign[0]!a} in this path; "
            "use a folder without %, backslashes and line breaks in its path"
        )


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that is still there after a loss of power."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    fsync_path(path.parent)


def fsync_path(path: str | Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: str | Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: there is none, or it is a pipe or a device, where reading could wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    file = open(descriptor, "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


def check_file(path: str | Path) -> None:
    """Refuse a folder or device before a library opens it; OSError as of `open_file`."""
    open_file(path).close()


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8; raises OSError, as `open_file`, and UnicodeDecodeError."""
    with open_file(path) as file:
        return file.read().decode()


def write_text(path: str | Path, text: str) -> None:
    """Write `text` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_record(path: str | Path, value: dict[str, Any]) -> None:
    """Write a mapping that decides something: as `write_json`, with format and own checksum."""
    write_json(path, sealed(value))


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` with its format and its own checksum."""
    value = {"format": FORMAT} | value
    return value | {CHECKSUM: checksum(value)}


def check_format(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record's values without its format; OtherFormatError if that is another."""
    rest = dict(value)
    if str(written := rest.pop("format", FORMAT)) != str(FORMAT):
        raise OtherFormatError(
            f"format {written}, and this version of maect reads {FORMAT}: use the version that "
            "wrote it, or delete it and start again"
        )
    return rest


def verified(value: Any) -> dict[str, Any]:
    """Return the record that `sealed` was given.

    Raises:
        ValueError: the checksum is missing or differs, or (OtherFormatError) the format does.
    """
    if not isinstance(value, dict) or CHECKSUM not in value:
        raise ValueError("it has no checksum")
    rest = {key: value[key] for key in value if key != CHECKSUM}
    if value[CHECKSUM] != checksum(rest):
        raise ValueError("its checksum differs")
    return check_format(rest)


def checksum(value: dict[str, Any]) -> str:
    """Return the sha256 of a mapping as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_json(path: str | Path, missing: Any = None) -> Any:
    """Read a JSON file that is no record; `missing`, unless None, stands for one that is not there.

    Raises:
        UserError: the file is missing (MissingFileError), or not JSON.
    """
    try:
        return json.loads(read_text(path))
    except FileNotFoundError:
        if missing is None:
            raise MissingFileError(f"{path}: no such file") from None
        return missing
    except OSError as error:
        if error.errno not in FINAL:
            raise
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def read_record(path: str | Path, cure: str = "") -> dict[str, Any]:
    """Read a record of `write_record`, without its format and checksum.

    Args:
        cure: of a damaged one, in place of deleting it.

    Raises:
        UserError: the file is missing (MissingFileError), damaged or of another format.
    """
    value = read_json(path)
    try:
        return verified(value)
    except OtherFormatError as error:
        raise UserError(f"{path}: {error}") from None
    except ValueError as error:
        cure = cure or "delete it and start again: it is made again"
        raise UserError(f"{path}: damaged ({error}); {cure}") from None


def seek_record(path: Path) -> dict[str, Any]:
    """Read a record that others may be writing or removing; {} if it is missing or damaged."""
    try:
        return verified(json.loads(read_text(path)))
    except (OSError, ValueError):
        return {}


def with_retries(read: Callable[..., T], *arguments: Any) -> T:
    """Call `read` until the file system stops refusing, or for a quarter of a minute (OSError)."""
    for seconds in WAITS:
        try:
            return read(*arguments)
        except OSError as error:
            if error.errno in FINAL:
                raise
            time.sleep(seconds)
    return read(*arguments)


def sha256_file(path: str | Path) -> str:
    """Return the hexadecimal sha256 of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_table_text(path: Path, text: str) -> None:
    """Write a table, and beside it its checksum, which `sha256sum -c` can compare, too."""
    path.with_name(path.name + SUMS).unlink(missing_ok=True)
    write_text(path, text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    write_text(path.with_name(path.name + SUMS), f"{sha256}  {path.name}\n")


def read_table_text(path: Path) -> str:
    """Read a table; one that `write_table_text` wrote is checked against its checksum.

    Raises:
        UserError: there is none, or it is not as it was written.
    """
    sums = path.with_name(path.name + SUMS)
    try:
        text = read_text(path)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        if sums.exists() and read_text(sums) != f"{sha256}  {path.name}\n":
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        raise UserError(f"{path}: no such table") from None
    except ValueError as error:
        raise UserError(
            f"{path}: damaged or edited ({error}); make it again: delete it and {sums.name}"
        ) from None
    return text


def fill_template(path: Path, **values: Any) -> str:
    """Return the text of a template; jinja2's UndefinedError if it names a value that is missing.

    Tags on lines of their own leave nothing of these lines.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
