"""Environment of the processes that a command starts."""

import logging
import os
import pwd
import tempfile
from pathlib import Path

from maect.core.errors import UserError
from maect.core.owners import private_folder

log = logging.getLogger(__name__)

SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own: nothing is imported from the working folder, where others may write."""


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
