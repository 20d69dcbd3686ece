"""Collect what a bare GPU machine lacks, to be carried there: `make gpu-packages`.

    python tests/gpu/packages.py --out build/packages [--python 3.12]

Of such a machine PyTorch with what it brings, timm, numpy, SciPy and Pillow are expected. The
versions are the lock file's. The native decoder comes along with its libjpeg, for x86-64 and glibc.
CIFAR-10 is a second thing to carry, `build/cifar10.tar.xz`, where MAECT_TEST_DATA has it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from maect.data.native import LIBRARY
from maect.data.native.build import build

LOCK = Path(__file__).parents[2] / "envs" / "requirements.lock"
NAMES = (
    "deepspeed", "hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
    "simplejpeg", "isal", "psutil", "einops", "msgpack", "py-cpuinfo",
    "threadpoolctl", "tensorboard", "protobuf", "absl-py",
)  # fmt: skip
IMAGES = "cifar10.tar.xz"
"""In MAECT_TEST_DATA, of train/CLASS/IMAGE and test/CLASS/IMAGE."""
MOST = 40_000_000
"""Bytes: what can be carried to a machine beside the repository."""


def pinned(lock: str) -> list[str]:
    """Requirements of `NAMES` with the versions of a lock file."""
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in NAMES]


def collect(out: Path, python: str) -> int:
    """Fill a folder anew; returns its bytes."""
    shutil.rmtree(out, ignore_errors=True)
    words = ["pip", "install", "--quiet", "--target", str(out), "--python-version", python]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *words, "--no-deps", *pinned(LOCK.read_text())], check=True)
    build(out / LIBRARY.name)
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/packages"))
    parser.add_argument("--python", default="3.12", help="of the machine")
    options = parser.parse_args()
    size = collect(options.out, options.python)
    print(f"{options.out}: {size / 1e6:.0f} MB for Python {options.python}")
    images = Path(os.environ.get("MAECT_TEST_DATA", "/nonexistent")) / IMAGES
    if images.exists():
        shutil.copyfile(images, options.out.parent / IMAGES)
        print(f"{options.out.parent / IMAGES}: {images.stat().st_size / 1e6:.0f} MB of images")
    return 0 if size < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
