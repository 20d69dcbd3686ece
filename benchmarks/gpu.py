"""What nine minutes of one GPU tell: whether it computes right, how fast, and a training.

    python benchmarks/gpu.py --out FOLDER [--packages FILE] [--images FILE] [--only NAMES]

Five processes (gpu_parts.py) run one after the other, each until its own deadline at the latest.
`report.json` in the folder is whole after every line. Of the machine only PyTorch 2.11 or newer,
timm, NumPy, SciPy, scikit-learn and Pillow are expected: `make gpu-packages` collects the rest in
one archive. With `--only control,longer,huge` the training goes on from what an earlier call left
on this machine, and ViT-H is timed. On a CPU, and with `--small`, all shapes are tiny. Exit status
1: something that must hold does not.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL = 535
"""Seconds for all processes together."""
FIRST = {"correct": 85, "fast": 100, "cifar10": 240, "stages": 100, "machine": 50}
SECONDS = FIRST | {"control": 60, "longer": 240, "huge": 60}
"""After which each process is ended at the latest."""


def surroundings(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a process, as jobs have it; unpacks what was carried along."""
    path = [str(ROOT)]
    if options.packages:
        site = options.work / "packages"
        if not site.exists():
            with tarfile.open(options.packages) as archive:
                archive.extractall(site, filter="data")
            native = ROOT / "maect" / "data" / "native"
            for file in site.glob("lib*.so*"):
                with suppress(OSError):  # a folder that cannot be written: another decoder does
                    (native / file.name).write_bytes(file.read_bytes())
        path.append(str(site))
    path += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    found.setdefault("OMP_WAIT_POLICY", "passive")
    found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})


class Report:
    """Lines of all processes; the file is whole after each of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        self._began = time.monotonic()

    def add(self, part: str, line: dict[str, Any]) -> None:
        """Add a line, and write all."""
        self.lines.append({"part": part, "at": round(time.monotonic() - self._began, 1), **line})
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.lines, indent=1) + "\n")
        new.replace(self.file)
        print(json.dumps(self.lines[-1])[:400], flush=True)


def run(name: str, seconds: float, options: argparse.Namespace, report: Report) -> None:
    """Run a part in a process of its own, and end it after so many seconds."""
    script = Path(__file__).with_name("gpu_parts.py")
    words = [sys.executable, "-u", script, name, "--out", options.out, "--work", options.work]
    words += ["--small"] * options.small
    words += ["--images", options.images] if options.images else []
    with open(options.out / "log.txt", "a") as log:
        print(f"--- {name}", file=log, flush=True)
        job = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, env=options.environment,
            process_group=0, preexec_fn=end_with_parent,
        )  # fmt: skip
        end = threading.Timer(seconds, os.killpg, (job.pid, signal.SIGKILL))
        end.start()
        assert job.stdout is not None
        for text in job.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                print(text, end="", file=log, flush=True)
            else:
                report.add(name, line)
        job.wait()
        end.cancel()
        with suppress(ProcessLookupError):  # with all that it started
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode:
        why = f"ended after {seconds:.0f} s" if job.returncode == -9 else f"code {job.returncode}"
        report.add(name, {"name": name, "error": why})


def end_with_parent() -> None:
    """Let this process be killed when the one that started it is gone, however that ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--packages", type=Path, help="archive of packages that are not installed")
    parser.add_argument("--images", type=Path, help="CIFAR-10 as a tar archive")
    parser.add_argument("--only", help=f"with commas between: {', '.join(SECONDS)}")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for all processes")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.images = options.images and options.images.resolve()
    options.work = options.work or Path(tempfile.gettempdir()) / f"maect-{os.getuid()}-gpu"
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(mode=0o700, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.environment = surroundings(options)
    report, began = Report(options.out / "report.json"), time.monotonic()
    for name in options.only.split(",") if options.only else FIRST:
        left = options.seconds - (time.monotonic() - began)
        if left < 10:
            report.add(name, {"name": name, "error": "not begun: out of time"})
            continue
        run(name, min(left, SECONDS[name]), options, report)
    wrong = [line["name"] for line in report.lines if not line.get("holds", True)]
    print(f"{options.out}: " + (f"does not hold: {', '.join(wrong)}" if wrong else "all holds"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
