"""Time and memory of the index and the order from 10^4 to 10^7 samples.

`python benchmarks/growth.py`. Each size is measured in a process of its own on a
memory-mapped index (a sparse file): opening it, which hashes it, the first global batch of an
epoch, the last one after a restart, and for up to 1.3 million samples the order of a whole epoch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from maect.core.files import sha256_file, write_record
from maect.data.index import CHECKSUMS, COLUMNS, open_index
from maect.data.order import Order

SIZES = (10**4, 10**5, 1_281_167, 10**7)
BATCH = 1024
SECONDS, MEGABYTES = 1.0, 300.0
KEYS = ("n", "open", "first_batch", "resume", "epoch", "peak_mb")


def simulate(folder: Path, n: int) -> None:
    """An index of `n` samples without content."""
    files = {"index.npy": (np.int64, (n, len(COLUMNS))), CHECKSUMS: (np.uint32, (n,))}
    for name, (dtype, shape) in files.items():
        np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=shape)
    (folder / "train-000000.tar").touch()
    record = {
        "n": n,
        "class_names": [],
        "digest": "simulated",
        "index_sha256": sha256_file(folder / "index.npy"),
        "crc32_sha256": sha256_file(folder / CHECKSUMS),
        "shards": [{"file": "train-000000.tar", "size": 0, "sha256": "", "count": n}],
    }
    write_record(folder / "index.json", record)


def measure(folder: Path) -> dict[str, float | int | None]:
    """Times in seconds, and this process's peak memory in MB."""
    start = time.perf_counter()
    index = open_index(folder)
    opened = time.perf_counter()
    first = Order(index.n, 0).take(0, BATCH)[0]
    index.rows[first].sum()
    begun = time.perf_counter()
    # A restart knows nothing of the steps before: a new order, the epoch's last batch.
    last = Order(index.n, 0).take(7 * index.n - BATCH, BATCH)[0]
    index.rows[last].sum()
    resumed = time.perf_counter()
    epoch = None
    if index.n <= 1_300_000:
        order = Order(index.n, 1)
        seen = np.zeros(index.n, bool)
        for position in range(0, index.n, BATCH):
            seen[order.take(position, min(BATCH, index.n - position))[0]] = True
        assert seen.all()
        epoch = round(time.perf_counter() - resumed, 3)
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return {
        "n": index.n,
        "open": round(opened - start, 3),
        "first_batch": round(begun - opened, 3),
        "resume": round(resumed - begun, 3),
        "epoch": epoch,
        "peak_mb": round(peak),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    print(*KEYS, sep=",")
    met = True
    for n in SIZES:
        with tempfile.TemporaryDirectory() as name:
            simulate(Path(name), n)
            command = [sys.executable, __file__, "--measure", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        line = json.loads(done.stdout)
        print(*("" if line[key] is None else line[key] for key in KEYS), sep=",", flush=True)
        met &= max(line[key] or 0 for key in KEYS[1:-1]) < SECONDS and line["peak_mb"] < MEGABYTES
    print("all below 1 s and 300 MB" if met else "MISSED: 1 s and 300 MB")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
