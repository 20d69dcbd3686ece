"""Builds the native extension: `python -m maect.data.native.build`."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.data.native import LIBRARY, SOURCE, source_hash

_HINT = (
    "install a C compiler and the headers of libjpeg-turbo (Debian: gcc libjpeg62-turbo-dev, "
    "Ubuntu: gcc libjpeg-turbo8-dev; elsewhere set CC, CFLAGS and LDFLAGS). Without the extension "
    "everything works, but JPEGs load at about two thirds of the speed"
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


def build() -> Path:
    """Compile the library beside its source."""
    with atomic_write(LIBRARY) as temporary:
        # -Bsymbolic: other modules of the process bring libjpegs of their own.
        compile_c([SOURCE], temporary, "-shared", "-Wl,-Bsymbolic")
    return LIBRARY


if __name__ == "__main__":
    try:
        print(f"native decoder: built {build()}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
