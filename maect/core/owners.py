"""Keep other users of the machine out: of folders that are opened, and of processes' environment.

You trust yourself, root and your group: `docs/reference/other_users.md`.
"""

import logging
import os
import pwd
import stat
import tempfile
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import check_literal_path

log = logging.getLogger(__name__)

SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own: nothing is imported from the working folder, where others may write."""


def why_public(path: str | Path, sticky: bool = False) -> str | None:
    """Return why any user may put something of his own in the place of `path`; None: none may.

    The path counts itself, and every folder above it that is not sticky as `/tmp` is. What is not
    there yet is nobody's.

    Args:
        sticky: let the path itself be sticky, too.
    """
    real = Path(os.path.realpath(path))
    for at in (real, *real.parents):
        try:
            mode = at.stat().st_mode
        except FileNotFoundError:
            continue
        is_sticky = bool(mode & stat.S_ISVTX) and (sticky or at != real)
        if mode & stat.S_IWOTH and not is_sticky:
            where = "there" if stat.S_ISDIR(mode) else "it"
            return f"{at}: every user may write {where}; run `chmod o-w {at}`"
    return None


def check_working_folder() -> None:
    """Refuse a working folder where others could put something in Snakemake's way (UserError)."""
    here = Path.cwd()
    check_literal_path(here)
    if reason := why_public(here, sticky=True):
        raise UserError(f"{reason}; or start in a folder of your own")


def refuse_public(path: str | Path) -> None:
    """Refuse a folder or file that any user may write or replace (UserError)."""
    if reason := why_public(path):
        raise UserError(reason)


def private_folder(path: Path) -> Path:
    """Make a folder below a public one that nobody else can enter, or take the one that is there.

    Raises:
        OSError: it cannot be made.
        UserError: somebody else has made it.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UserError(f"{path}: not a folder of yours")
    path.chmod(0o700)
    return path


def environment() -> dict[str, str]:
    """Return the environment for processes that import nothing from the working folder."""
    variables = dict(os.environ) | {SAFE_PATH: "1"}
    # An empty entry, as in `PYTHONPATH=$PYTHONPATH:...`, is the working folder; `lib` is below it.
    paths = filter(os.path.isabs, variables.pop("PYTHONPATH", "").split(os.pathsep))
    if kept := os.pathsep.join(paths):
        variables["PYTHONPATH"] = kept
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # a container's user has a number only: libraries ask for the name
        variables = {"LOGNAME": str(os.getuid())} | variables
    return variables


def private_caches() -> None:
    """Point the caches of torch's compiler to a folder that only this user can write.

    Its own folder lies below `/tmp` under a name that anybody may have made before.
    """
    folder = Path(tempfile.gettempdir()) / f"maect-{os.geteuid()}"
    try:
        folder = private_folder(folder)
    except (OSError, UserError) as error:
        log.warning("%s: what is compiled is not kept", error)
        folder = Path(tempfile.mkdtemp(prefix="maect-compiled-"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not os.environ.get(name):
            os.environ[name] = str(private_folder(folder / name.partition("_")[0].lower()))
