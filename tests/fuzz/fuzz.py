"""Fuzzes the native decoder under AddressSanitizer and UndefinedBehaviorSanitizer.

`python tests/fuzz/fuzz.py 1000000 --out docs/results/fuzz_jpeg.json` is the recorded run; the unit
tests run a short one. Any finding ends with a non-zero status and the sanitizer's report.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from maect.core.files import write_json
from maect.data.native import SOURCE, source_hash
from maect.data.native.build import compile_c

SANITIZERS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
              "-fno-sanitize-recover=all")  # fmt: skip


def write_seeds(folder: Path) -> list[Path]:
    """Small JPEGs of every kind that the decoder takes or must refuse."""
    photo = Image.fromarray(load_sample_images().images[0])
    rng = np.random.default_rng(0)
    kinds: list[tuple[str, dict]] = [
        (mode, {"quality": q, "subsampling": s, "progressive": p, "restart_marker_rows": r})
        for mode in ("RGB", "RGB", "RGB", "L", "CMYK")
        for q, s, p, r in (
            (50, 2, False, 0),
            (90, 0, False, 0),
            (75, 1, False, 1),
            (80, 2, True, 0),
        )
    ]
    paths = []
    for number, (mode, options) in enumerate(kinds * 2):
        w, h = (int(v) for v in rng.integers(1, 90, 2))
        stream = io.BytesIO()
        photo.crop((100, 100, 100 + w, 100 + h)).convert(mode).save(stream, "JPEG", **options)
        paths.append(folder / f"{number:02d}.jpg")
        paths[-1].write_bytes(stream.getvalue())
    return paths


def fuzz(count: int, seed: int = 0) -> dict:
    """Run the harness; returns the record.

    Raises:
        AssertionError: a sanitizer's finding, with its report.
    """
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "fuzz_jpeg"
        compile_c([Path(__file__).with_name("fuzz_jpeg.c"), SOURCE], program, *SANITIZERS)
        seeds = write_seeds(Path(name))
        environment = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"}
        start = time.monotonic()
        done = subprocess.run(
            [program, str(count), str(seed), *seeds],
            capture_output=True,
            text=True,
            env=environment,
        )
        took = time.monotonic() - start
    assert done.returncode == 0, done.stderr[-8000:]
    numbers = re.findall(r"(\w[\w ]*) (\d+)", done.stdout)
    return {
        "seed": seed,
        "sanitizers": "address, undefined",
        "findings": 0,
        "source": source_hash(),
        "seconds": round(took),
        **{name.strip(): int(value) for name, value in numbers},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = fuzz(options.count, options.seed)
    print(record)
    if options.out:
        write_json(options.out, record)
    sys.exit(0)
