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


def curve(sizes: tuple[int, ...]) -> list[dict]:
    """One measurement per size, each in a fresh process."""
    lines = []
    for n in sizes:
        with tempfile.TemporaryDirectory() as name:
            simulate(Path(name), n)
            command = [sys.executable, __file__, "--measure", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines.append(json.loads(done.stdout))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    lines = curve(SIZES)
    print(f"{'samples':>13}{'open':>9}{'first':>9}{'resume':>9}{'epoch':>9}{'peak MB':>9}")
    for line in lines:
        epoch = "" if line["epoch"] is None else f"{line['epoch']:.3f}"
        print(f"{line['n']:>13,}{line['open']:>9.3f}{line['first_batch']:>9.3f}"
              f"{line['resume']:>9.3f}{epoch:>9}{line['peak_mb']:>9}")  # fmt: skip
    times = [line[key] or 0 for line in lines for key in ("open", "first_batch", "resume", "epoch")]
    met = max(times) < SECONDS and max(line["peak_mb"] for line in lines) < MEGABYTES
    print("all below 1 s and 300 MB" if met else "MISSED: 1 s and 300 MB")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
