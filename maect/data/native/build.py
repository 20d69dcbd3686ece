"""Build the native extension: `python -m maect.data.native.build`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.data.native import LIBRARY, SOURCE, source_hash

_HINT = (
    "install a C compiler and the headers of libjpeg-turbo (Debian: gcc libjpeg62-turbo-dev, "
    "Ubuntu: gcc libjpeg-turbo8-dev; elsewhere set CC, CFLAGS and LDFLAGS). Without the extension "
    "everything works, but JPEGs load at two thirds of the speed, small ones at a quarter"
)
# No fused multiply-add: weights must be the same on every machine.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra")


def compile_c(sources: Sequence[Path], output: Path, *flags: str) -> None:
    """Compile and link against libjpeg, or raise a UserError with a hint."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise UserError(f"native decoder: no C compiler; {_HINT}")
    command = [
        *shlex.split(compiler), *_FLAGS, f"-DSOURCE={source_hash()}",
        *shlex.split(os.environ.get("CFLAGS", "")), *flags, *map(str, sources), "-o", str(output),
        *shlex.split(os.environ.get("LDFLAGS", "")), "-ljpeg", "-lm",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"native decoder: {compiler}: {error.strerror}; {_HINT}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["failed"]
        raise UserError(f"native decoder: {lines[0]}; {_HINT}")


def build(library: Path = LIBRARY) -> Path:
    """Compile the library, and copy its libjpeg next to it.

    So a node or container without libjpeg, or with another one, decodes the same bits.
    """
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, library.name)
        # -Bsymbolic: other modules of the process bring libjpegs of their own. The first place to
        # look for one is the library's own folder, also before LD_LIBRARY_PATH.
        found = ("-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
        compile_c([SOURCE], new, "-shared", "-Wl,-Bsymbolic", *found)
        for path in (*_libjpeg(new), new):
            with atomic_write(library.with_name(path.name)) as temporary:
                shutil.copy(path, temporary)
    return library


def _libjpeg(library: Path) -> list[Path]:
    """Return the shared libjpeg of a library, by the name that the library asks for.

    The list is empty if libjpeg is linked in, or if `ldd` is missing or does not find it.
    """
    try:
        needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True)
    except OSError:
        return []
    found = re.findall(r"(libjpeg\S*) => (/\S+)", needed.stdout)
    return [Path(place).with_name(name) for name, place in found]


if __name__ == "__main__":
    try:
        print(f"native decoder: built {build()}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
