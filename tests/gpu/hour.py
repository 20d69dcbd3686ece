"""What an hour on an unknown GPU machine should tell, the most important first.

    python -u tests/gpu/hour.py --out FOLDER [--minutes 45] [--call 9] [--packages FOLDER]

A call ends before `--call` minutes, with exit status 3 while there is more to do: call it again
(`make gpu-hour` does). `report.json` is written before and after each check, and all logs are in
`log.txt`; a trace is the third and last file. A call that is killed loses the check that it was at,
which is not tried again. On another machine a call goes on where a `report.json` in its folder
ends. Exit status 1: a check failed that must hold. On a CPU, and with `--small`, shapes are tiny.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import first_day
from first_day import CASES, CHECKS, START, Alone, Here

MORE = 3
"""Exit status while there is more to do."""
MUST = (0, 1, 2, 5, 10, 9, 16, 3, 4, 15)
MEASURED = (6, 14, 8, 12, 13, 11)
LEAST_TRAINING = 60
"""Seconds for which the last training is worth its start."""


@dataclass(frozen=True)
class Step:
    """Something to do in a process of its own.

    Attributes:
        name: in the report.
        seconds: that it is expected to take.
        command: behind Python's name; its last line is JSON.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """All steps, the most important first; the last training comes behind them."""
    own = ("--small",) * options.small
    own += ("--device", options.device) if options.device else ()

    def check(number: int) -> Step:
        function, planned = CHECKS[number]
        words = (first_day.__file__, "--check", str(number), "--out", str(options.out), *own)
        return Step(function.__name__, planned, words)

    def speed(case: tuple[str, str, int], how: str) -> Step:
        name = "speed " + " ".join([*map(str, case), how])
        do = json.dumps([*case, how])
        return Step(name, 25, (__file__, "--speed", do, "--out", str(options.out), *own))

    yield from map(check, MUST)
    first = next(iter(CASES))
    for case in CASES:
        yield speed(case, "plain")
    for case in CASES:
        yield speed(case, "compiled")
    yield written_by_hand(options, *first)
    for how in ("deterministic", "packed", "cuDNN"):
        yield speed(first, how)
    yield from map(check, MEASURED)


def written_by_hand(options: argparse.Namespace, recipe: str, size: str, batch: int) -> Step:
    """The step of facebookresearch/mae, to compare `speed` of the same case with."""
    small = options.small or options.device == "cpu"
    value = {
        "recipe": recipe, "size": "tiny" if small else size, "explicit": True,
        "changes": {"precision": "bf16"}, "batch": 8 if small else batch,
        "steps": 3 if small else 12, "device": options.device or "cuda",
    }  # fmt: skip
    script = Path(__file__).parents[1] / "benchmarks" / "training.py"
    name = f"speed {recipe} {size} {batch} as in facebookresearch/mae"
    return Step(name, 25, (str(script), "--measure", json.dumps(value)))


def here_of(options: argparse.Namespace, folder: Path) -> Here:
    """Where this process computes."""
    import torch

    cuda = options.device != "cpu" and torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(max(1, Alone.cpus))
    return Here(
        torch.device("cuda" if cuda else "cpu"), options.small or not cuda, folder, options.out
    )


def work_folder(out: Path) -> Path:
    """Images and trainings, which do not come back: not below `out`."""
    name = f"maect-{os.getuid()}-hour-{zlib.crc32(str(out).encode()):08x}"
    return Path(tempfile.gettempdir()) / name


class Until(Alone):
    """A rank that is told to stop at a moment of the monotonic clock."""

    def __init__(self, gpus: bool, moment: float) -> None:
        super().__init__(gpus=gpus)
        self._moment, self.last = moment, dict[str, Any]()

    def stop_requested(self) -> bool:
        return time.monotonic() >= self._moment

    def report(self, progress: dict[str, Any], /) -> None:
        super().report(progress)
        self.last = progress


def drawn(out: Path) -> Path:
    """Images where none are given: scikit-learn's digits, or noise without it."""
    from maect.data.digits import write_digits

    try:
        write_digits(out / "images")
    except ImportError:
        first_day.jpegs(out / "noise", 400, 64)
        return out / "noise" / "images"
    return out / "images" / "train"


def carried(packages: Path | None) -> None:
    """Put the native decoder that was carried along beside its source, where there is none."""
    from maect.data.native import LIBRARY

    if packages is None or LIBRARY.exists():
        return
    with suppress(OSError):  # a folder that cannot be written: another decoder does
        for file in (*packages.glob(LIBRARY.name), *packages.glob("libjpeg.so*")):
            shutil.copy(file, LIBRARY.parent)


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Pre-train on images for so many seconds, or go on with that; k-NN accuracy as it learns."""
    from maect.data.shards import shard
    from maect.recipes import OnlineEvaluation
    from maect.train.trainer import RunInputs, train

    moment = time.monotonic() + options.training
    work = work_folder(options.out)
    work.mkdir(mode=0o700, exist_ok=True)
    here = here_of(options, work)
    shards = work / "shards"
    if not (shards / "index.json").exists():
        shard(options.images or drawn(work), shards, "folder", 1)
    size = options.size or "tiny"
    stage, encoder = first_day.stage_of(here, "mae", size, 64 if here.small else 256)
    stage = stage.model_copy(update={"epochs": options.epochs})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    context = Until(here.cuda, moment)
    run = RunInputs(work / "training", shards, stage, encoder, 0)
    verdict = train(context, run, look=OnlineEvaluation())
    return {"status": "passed" if verdict == "done" else "goes on", "values": context.last}


def do(options: argparse.Namespace) -> dict[str, Any]:
    """What one of these processes was started for."""
    try:
        if options.training:
            return training(options)
        recipe, size, batch, how = json.loads(options.speed)
        with tempfile.TemporaryDirectory() as name:
            here = here_of(options, Path(name))
            if how in ("compiled", "cuDNN", "packed") and not here.cuda:
                return {"status": "needs a GPU"}
            return {
                "status": "passed",
                "values": first_day.speed_of(here, recipe, size, batch, how),
            }
    except first_day.Needs as needs:
        return {"status": f"needs {needs}"}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"status": "error", "error": text[-1500:]}


def versions() -> dict[str, str]:
    """What the checks run with, known before any of them has run."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "timm", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


class Report:
    """Lines of all calls so far; one without a status was killed, or is under way."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        for line in self.lines:
            if "status" not in line:
                line |= {"status": "killed", "seconds": self._until_the_last_words()}

    def _until_the_last_words(self) -> float:
        """Seconds from a check's beginning, when the report was written, to what was said last."""
        log = self.file.with_name("log.txt")
        last = log.stat().st_mtime if log.exists() else 0.0
        return max(0.0, last - self.file.stat().st_mtime)

    @property
    def spent(self) -> float:
        """Seconds of all checks."""
        return sum(line.get("seconds", 0.0) for line in self.lines)

    def run(self, step: Step, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
        """Run a step, with a line in the report before and after."""
        # The first check may be killed; what all run with is known without it.
        told = {} if self.lines else {"with": versions()}
        self.lines.append({"name": step.name, **told})
        first_day.write(self.file, self.lines)
        environment = first_day.surroundings(options.packages, options.device)
        command = [sys.executable, "-u", *step.command]
        found = first_day.result(command, options.out, environment, seconds)
        found.pop("check", None)
        self.lines[-1] = {"status": "passed", **found, "name": step.name, **told}
        if "values" not in found and "images_per_second" in found:
            self.lines[-1]["values"] = {"images_per_second": found["images_per_second"]}
        first_day.write(self.file, self.lines)
        print(json.dumps(self.lines[-1]), flush=True)
        return self.lines[-1]


def call(options: argparse.Namespace) -> int:
    """Do what fits into this call; returns the exit status."""
    began = time.perf_counter()
    report = Report(options.out / "report.json")
    before = report.spent
    known = {line["name"] for line in report.lines}

    def left() -> tuple[float, float]:
        """Seconds of this call, and of all."""
        gone = time.perf_counter() - began
        return 60 * options.call - gone, 60 * options.minutes - before - gone

    for step in steps(options):
        if step.name in known:
            continue
        need, (now, ever) = first_day.limit(step.seconds, "cuda"), left()
        if need > ever:
            continue  # a shorter one may fit
        if need > now:
            if now < 60 * options.call - 30:  # a new call has more time
                return MORE
            need = now
        # A CPU is slow, and only shows that it works.
        report.run(step, options, min(now, max(need, first_day.limit(0, options.device))))
    trainings = [line["status"] for line in report.lines if line["name"] == "training"]
    # One that was killed goes on from its last state, unless it was killed twice in a row.
    killed = trainings[-1:] == ["killed"] != trainings[-2:-1]
    if not trainings or trainings[-1] == "goes on" or killed:
        now, ever = left()
        seconds = min(now, ever) - START - 30
        if seconds < LEAST_TRAINING < ever - START - 30:
            return MORE
        if seconds >= LEAST_TRAINING:
            words = [__file__, "--training", str(seconds), "--out", str(options.out)]
            words += ["--images", str(options.images)] if options.images else []
            words += ["--size", options.size] if options.size else []
            words += ["--epochs", str(options.epochs)]
            words += ["--small"] * options.small
            words += ["--device", options.device] if options.device else []
            step = Step("training", seconds, tuple(words))
            if report.run(step, options, min(now, ever))["status"] == "goes on":
                return MORE
    table(report.lines)
    return 1 if any(line.get("must") for line in report.lines) else 0


def table(lines: list[dict[str, Any]]) -> None:
    """A line for each check."""
    print()
    for line in lines:
        why = ", ".join([*line.get("failed", []), *line.get("missed", [])])
        mfu = line.get("values", {}).get("mfu")
        shown = f"MFU {mfu:.1%}" if mfu else why
        print(f"{line['name']:<50} {line.get('seconds', 0):6.1f} s  {line['status']:<12} {shown}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--minutes", type=float, default=45, help="of all calls together")
    parser.add_argument("--call", type=float, default=9, help="minutes of a call, at most")
    parser.add_argument("--packages", type=Path, help="folder of packages that are not installed")
    parser.add_argument("--images", type=Path, help="of the last training, a folder of each class")
    parser.add_argument("--size", help="of its encoder: micro for 32 pixels, micro8 for 64")
    parser.add_argument("--epochs", type=int, default=200, help="of it")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--speed", help=argparse.SUPPRESS)
    parser.add_argument("--training", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.speed or options.training:
        print(json.dumps(first_day.finite(do(options))), flush=True)
        return 0
    if not (options.out / "report.json").exists():
        shutil.rmtree(work_folder(options.out), ignore_errors=True)
    carried(options.packages)
    first_day.end_with_children()
    return call(options)


if __name__ == "__main__":
    sys.exit(main())
