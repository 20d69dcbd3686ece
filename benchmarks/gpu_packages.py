"""Collect what a bare GPU machine lacks in one archive, to be carried there: `make gpu-packages`.

    python benchmarks/gpu_packages.py --out build/packages.tar.gz [--python 3.12]

The versions are the lock file's. The native decoder comes along with its libjpeg, for x86-64 and
glibc. benchmarks/gpu.py says what such a machine has to have.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from maect.data.native import LIBRARY
from maect.data.native.build import build

LOCK = Path(__file__).parents[1] / "envs" / "requirements.lock"
NAMES = (
    "deepspeed", "hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
    "isal",
)  # fmt: skip
MOST = 6_000_000
"""Bytes of the archive."""


def pinned(lock: str) -> list[str]:
    """Return the requirements of `NAMES` with the versions of a lock file."""
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in NAMES]


def collect(out: Path, python: str) -> int:
    """Write the archive; returns its bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as name:
        words = ["pip", "install", "--quiet", "--target", name, "--python-version", python]
        subprocess.run([uv, *words, "--no-deps", *pinned(LOCK.read_text())], check=True)
        build(Path(name) / LIBRARY.name)
        with tarfile.open(out, "w:gz", compresslevel=9) as archive:
            archive.add(name, ".", filter=lambda entry: None if _unread(entry.name) else entry)
    return out.stat().st_size


def _unread(name: str) -> bool:
    """Return whether nothing reads a file: compiled modules, and sources of operators."""
    return "__pycache__" in name or "/csrc/" in name or name.startswith("./bin/")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/packages.tar.gz"))
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    options = parser.parse_args()
    size = collect(options.out, options.python)
    print(f"{options.out}: {size / 1e6:.1f} MB for Python {options.python}")
    return 0 if size <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
