"""What an hour on an unknown GPU machine should tell, the most important first.

    python -u tests/gpu/hour.py --out FOLDER [--minutes 45] [--call 9] [--packages FOLDER]

A call ends before `--call` minutes, with exit status 3 while there is more to do: call it again
(`make gpu-hour` does). `report.json` is written before and after each check, and all logs are in
`log.txt`; a trace and, in the end, a page are the last two files. A call that is killed loses the
check that it was at, which is not tried again. On another machine a call goes on where a
`report.json` in its folder ends. Exit status 1: a check failed that must hold. On a CPU, and with
`--small`, shapes are tiny.

What is left of the time goes into MAE, its head and contrastive tuning, one after the other: as
many epochs as fit, on `--images` or on drawn shapes. The report has their learning curves.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tarfile
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
MUST = (0, 1, 2, 17, 5, 10, 9, 16, 3, 4, 15)
MEASURED = (6, 14, 8, 12, 13, 11)
ONLY_GPU = {"compiled", "packed"}
"""Words of ways to compute a step of which a CPU says nothing."""
SMALL = 60
"""Seconds that a check with tiny shapes takes on a slow CPU."""
TRAINING = "training"
STAGES = ("mae", "head_min", "ct_min")
"""Of the last training, by their recipes."""
LEAST_TRAINING = 60
"""Seconds for which it is worth its start."""
TIMED, TIMED_SECONDS = 60, 6
"""Steps of each stage that are timed for it, or fewer in so many seconds."""
SURE = 0.85
"""Part of its time that is planned."""
EVALUATIONS = 20
"""At an encoder while a stage trains, at most."""


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
    own = ("--built", str(work_folder(options.out) / "built"))
    own += ("--small",) * options.small
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
    first = CASES[0]
    for case in CASES:
        yield speed(case, "plain")
    for case in CASES:
        yield speed(case, "compiled")
    for how in (first_day.BY_HAND, "deterministic", "packed", "packed compiled"):
        yield speed(first, how)
    for size in ("large", "base"):  # hardly any arithmetic: the time of the host
        for how in ("plain", "compiled"):
            yield speed(("mae", size, 8), how)
    yield from map(check, MEASURED)


def here_of(options: argparse.Namespace, folder: Path) -> Here:
    """Where this process computes."""
    import torch

    cuda = options.device != "cpu" and torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(max(1, Alone.cpus))
    device, small = torch.device("cuda" if cuda else "cpu"), options.small or not cuda
    return Here(device, small, folder, options.out, options.built)


def work_folder(out: Path) -> Path:
    """Images and trainings, which do not come back: not below `out`."""
    name = f"maect-{os.getuid()}-hour-{zlib.crc32(str(out).encode()):08x}"
    return Path(tempfile.gettempdir()) / name


class Until(Alone):
    """A rank that is told to stop at a moment of the monotonic clock."""

    def __init__(self, gpus: bool, moment: float) -> None:
        super().__init__(gpus=gpus)
        self._moment = moment

    def stop_requested(self) -> bool:
        return time.monotonic() >= self._moment


def carried(packages: Path | None) -> None:
    """Put the native decoder that was carried along beside its source, where there is none."""
    from maect.data.native import LIBRARY

    if packages is None or LIBRARY.exists():
        return
    with suppress(OSError):  # a folder that cannot be written: another decoder does
        for file in (*packages.glob("libjpeg.so*"), *packages.glob(LIBRARY.name)):
            new = LIBRARY.with_name(f"{file.name}.new")
            shutil.copy(file, new)
            new.replace(LIBRARY.with_name(file.name))


def write_shards(given: Path | None, work: Path, few: bool) -> Path:
    """Shards of the images of the last training; of an archive those that are to be trained on."""
    from maect.data.shards import shard

    shards, source, kind = work / "shards", given, "folder"
    if (shards / "index.json").exists():
        return shards
    if source is None:
        source = drawn(work / "drawn", 600 if few else 20_000)
    elif source.is_dir():
        source = source / "train" if (source / "train").is_dir() else source
    else:  # in a tar that is packed nothing is read here and there
        source, kind = work / "images.tar", "archive"
        with tarfile.open(given) as packed, tarfile.open(source, "w") as tar:
            for member in packed:
                if member.isfile() and not {"test", "val"} & {*member.name.split("/")}:
                    tar.addfile(member, packed.extractfile(member))
    shard(source, shards, kind, 1, threads=max(1, Alone.cpus))
    return shards


def drawn(out: Path, count: int) -> Path:
    """Drawn shapes, sorted by which of them has most of an image."""
    import numpy as np
    from PIL import Image

    from maect.data.shapes import CLASSES, draw

    for number in range(count):
        image, mask = draw(number)
        kind = CLASSES[1 + int(np.bincount(mask.ravel(), minlength=6)[2:].argmax())]
        (out / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(out / kind / f"{number:05d}.png")
    return out


def fitted(rest: float, seconds: dict[str, float], most: dict[str, int]) -> dict[str, int]:
    """Epochs of each stage that fit into so many seconds, in the proportions of the recipes.

    Args:
        rest: seconds of all stages.
        seconds: of an epoch of each.
        most: epochs of its recipe.
    """
    part = min(1.0, rest / sum(seconds[name] * most[name] for name in most))
    return {name: max(1, int(part * epochs)) for name, epochs in most.items()}


def planned(options: argparse.Namespace, here: Here, work: Path) -> dict[str, Any]:
    """Which encoder is trained, and for how long: steps are timed with their loader, here.

    The largest encoder is taken that has a tenth of its recipe's epochs, or else the smallest.
    """
    import numpy as np

    from maect.data.index import HEIGHT, WIDTH, open_index

    began, file = time.monotonic(), work / "plan.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    index = open_index(write_shards(options.images, work, here.small))
    side = int(np.median(index.rows[:, [WIDTH, HEIGHT]]))
    sizes = ("tiny8",) if here.small else ("micro8",) if side >= 64 else ("small", "micro")
    first_day.join(here)
    calls = -(-options.rest // (60 * options.call))
    for size in (options.size,) if options.size else sizes:
        seconds, most, steps = {}, {}, {}
        for name in STAGES:
            stage, encoder = stage_for(name, size)
            told = here, index, stage, encoder, TIMED, TIMED_SECONDS
            step = first_day.step_from_loader(*told)
            seconds[name], most[name] = step * index.n / stage.batch_size, stage.epochs
            steps[name] = {"step_ms": 1e3 * step, "images_per_second": stage.batch_size / step}
        spent = time.monotonic() - began
        rest = SURE * (options.rest - spent - calls * (START + 30))
        epochs = fitted(rest, seconds, most)
        if epochs["mae"] >= most["mae"] / 10:
            break
    for name in STAGES:
        steps[name] |= {"epochs": epochs[name], "epochs_of_recipe": most[name]}
    plan = {
        "images": options.images.name.partition(".")[0] if options.images else "drawn shapes",
        "number": index.n, "encoder": size, "seconds": round(rest),
        "planned_in": round(spent), "stages": steps,
    }  # fmt: skip
    first_day.write(file, first_day.finite(plan))
    return plan


def stage_for(name: str, size: str) -> tuple[Any, Any]:
    """A recipe as it is, and the encoder."""
    from maect.recipes import load_encoder
    from maect.stages import load_recipe

    return load_recipe(name, size), load_encoder(size)


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Pre-train, initialise a head and tune for so many seconds, or go on with that."""
    from maect.recipes import OnlineEvaluation
    from maect.train.trainer import RunInputs, train

    moment = time.monotonic() + options.training
    work = work_folder(options.out)
    work.mkdir(mode=0o700, exist_ok=True)
    here = here_of(options, work)
    plan = planned(options, here, work)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    source = None
    for name, own in plan["stages"].items():
        stage, encoder = stage_for(name, plan["encoder"])
        stage = stage.model_copy(update={"epochs": own["epochs"]})
        online = OnlineEvaluation(every_epochs=-(-stage.epochs // EVALUATIONS))
        run = RunInputs(
            work / name, work / "shards", stage, encoder, 0, source, resize=encoder.image_size
        )
        if train(Until(here.cuda, moment), run, online=online) != "done":
            return {"status": "goes on"}
        source = run.folder
    return {"status": "passed"}


def learned(work: Path) -> dict[str, Any]:
    """What the last training was to do, and what each stage has learned so far.

    A curve has, at each online evaluation, the epoch, the mean loss since the one before and the
    accuracy of k-NN, in percent, on a held-out part of the training images.
    """
    if not (work / "plan.json").exists():
        return {}
    plan: dict[str, Any] = json.loads((work / "plan.json").read_text())
    for name, own in plan["stages"].items():
        curve, losses = [], list[float]()
        log = work / name / "metrics.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            with suppress(ValueError):  # the last one, of a training that was killed
                entry = json.loads(line)
                losses.append(entry["loss"])
                own["trained"] = entry["epoch"]
                if "online_knn" in entry:
                    mean = sum(losses) / len(losses)
                    knn = entry["online_knn"]
                    curve.append({"epoch": entry["epoch"], "loss": mean, "knn": knn})
                    losses = []
        own["curve"] = curve
    return dict(first_day.finite(plan))


def do(options: argparse.Namespace) -> dict[str, Any]:
    """What one of these processes was started for."""
    try:
        if options.training:
            return training(options)
        recipe, size, batch, how = json.loads(options.speed)
        if ONLY_GPU & {*how.split()} and options.device == "cpu":  # not even PyTorch is imported
            return {"status": "needs a GPU"}
        with tempfile.TemporaryDirectory() as name:
            here = here_of(options, Path(name))
            found = first_day.speed_of(here, recipe, size, batch, how)
            return {"status": "passed", "values": found}
    except first_day.Needs as needs:
        return {"status": f"needs {needs}"}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"status": "error", "must": True, "error": text[-1500:]}


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
                line |= self._learned(line["name"])

    def _until_the_last_words(self) -> float:
        """Seconds from a check's beginning, when the report was written, to what was said last."""
        log = self.file.with_name("log.txt")
        last = log.stat().st_mtime if log.exists() else 0.0
        return round(max(0.0, last - self.file.stat().st_mtime), 1)

    def _learned(self, name: str) -> dict[str, Any]:
        """Values of the last training, however it ended."""
        found = learned(work_folder(self.file.parent)) if name == TRAINING else {}
        return {"values": found} if found else {}

    @property
    def spent(self) -> float:
        """Seconds of all checks."""
        return sum(line.get("seconds", 0.0) for line in self.lines)

    def run(
        self, step: Step, options: argparse.Namespace, most: float, left: float
    ) -> dict[str, Any]:
        """Run a step, with a line in the report before and after.

        Args:
            step: what is run.
            options: of the command line.
            most: seconds, of which more are a fault.
            left: seconds, after which it is ended all the same.
        """
        # The first check may be killed; what all run with is known without it.
        told = {} if self.lines else {"with": versions()}
        self.lines.append({"name": step.name, **told})
        first_day.write(self.file, self.lines)
        environment = first_day.surroundings(options.packages, options.device)
        command = [sys.executable, "-u", *step.command]
        found = first_day.result(command, options.out, environment, min(most, left))
        found.pop("check", None)
        if found.get("status") == "too slow" and left < most:
            found |= {"status": "out of time", "must": False}
        self.lines[-1] = {"status": "passed", **found, **self._learned(step.name)}
        self.lines[-1] |= {"name": step.name, **told}
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
        most, (now, ever) = first_day.limit(step.seconds, options.device), left()
        need = SMALL if options.device == "cpu" else most
        if need > ever:
            continue  # a shorter one may fit
        if need > now < 60 * options.call - 30:  # a new call has more time
            return MORE
        report.run(step, options, most, min(now, ever))
    trainings = [line["status"] for line in report.lines if line["name"] == TRAINING]
    # One that was killed goes on from its last state, unless it was killed twice in a row.
    killed = trainings[-1:] == ["killed"] != trainings[-2:-1]
    if not trainings or trainings[-1] == "goes on" or killed:
        now, ever = left()
        seconds = min(now, ever) - START - 30
        if seconds < LEAST_TRAINING < ever - START - 30:
            return MORE
        if seconds >= LEAST_TRAINING:
            words = [__file__, "--training", str(seconds), "--rest", str(ever)]
            words += ["--call", str(options.call), "--out", str(options.out)]
            words += ["--built", str(work_folder(options.out) / "built")]
            words += ["--images", str(options.images)] if options.images else []
            words += ["--size", options.size] if options.size else []
            words += ["--small"] * options.small
            words += ["--device", options.device] if options.device else []
            step = Step(TRAINING, seconds, tuple(words))
            if report.run(step, options, math.inf, min(now, ever))["status"] == "goes on":
                return MORE
    said = page(report.lines)
    (options.out / "report.md").write_text(said)
    print(f"\n{said}")
    return 1 if any(line.get("must") for line in report.lines) else 0


def page(lines: list[dict[str, Any]]) -> str:
    """The report for people, as Markdown."""
    told = lines[0].get("with", {}) if lines else {}
    device = next((line["values"]["device"] for line in lines if "device" in values_of(line)), None)
    out = [
        f"# Checks on {device}" if device else "# The hour on a GPU, rehearsed on a CPU", "",
        *(() if device else ("Shapes are tiny: no speed here says anything about a GPU.", "")),
        f"{', '.join(f'{name} {version}' for name, version in told.items())}."
        f" {sum(line.get('seconds', 0.0) for line in lines) / 60:.0f} minutes of checks.", "",
        "| check | seconds | status | what was found |", "| --- | --: | --- | --- |",
    ]  # fmt: skip
    for line in lines:
        missed = ", ".join([*line.get("failed", []), *line.get("missed", [])])
        numbers = {
            key: f"{value:.3g}" if value < 1 else f"{round(value, 3):,}"
            for key, value in values_of(line).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        what = [missed] if missed else []
        what += [f"{key} {value}" for key, value in numbers.items()]
        seconds = f"{line['seconds']:.0f}" if "seconds" in line else ""
        status = line.get("status", "under way")
        out.append(f"| {line['name']} | {seconds} | {status} | {'; '.join(what)} |")
    trained = [values_of(line) for line in lines if line["name"] == TRAINING and values_of(line)]
    cut = ["", "The hour was cut off here: other checks and the last training are missing."]
    return "\n".join([*out, *(curves(trained[-1]) if trained else cut)]) + "\n"


def values_of(line: dict[str, Any]) -> dict[str, Any]:
    """Values of a check, if it has any."""
    return line.get("values") or {}


def curves(plan: dict[str, Any]) -> list[str]:
    """Lines about the last training: a table of its stages, and each one's learning curve."""
    out = [
        "", f"The last training: {plan['number']:,} images of {plan['images']}, encoder "
        f"{plan['encoder']}, epochs for {plan['seconds']:,} seconds.", "",
        "| stage | images a second | epochs, of the recipe's | k-NN, % (epoch) | loss |",
        "| --- | --: | --: | --- | --- |",
    ]  # fmt: skip
    for name, own in plan["stages"].items():
        seen = own["curve"]
        few = seen[:: max(1, len(seen) // 5)] if seen else []
        few += seen[-1:] if seen and few[-1] != seen[-1] else []
        knn = ", ".join(f"{one['knn']:.1f} ({one['epoch']:.0f})" for one in few)
        loss = ", ".join(f"{one['loss']:.3g}" for one in few)
        epochs = f"{own.get('trained', 0):.0f} of {own['epochs']}, {own['epochs_of_recipe']}"
        out.append(f"| {name} | {own['images_per_second']:,.0f} | {epochs} | {knn} | {loss} |")
    return out


def without_gpu(options: argparse.Namespace) -> bool:
    """Whether PyTorch sees no GPU; to ask it takes seconds, so only where no driver shows."""
    if any(Path("/dev", name).exists() for name in ("nvidiactl", "nvidia0", "dxg")):
        return False
    code = "import sys, torch; sys.exit(torch.cuda.is_available())"
    environment = first_day.surroundings(options.packages, None)
    return not subprocess.run([sys.executable, "-c", code], env=environment).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--minutes", type=float, default=45, help="of all calls together")
    parser.add_argument("--call", type=float, default=9, help="minutes of a call, at most")
    parser.add_argument("--packages", type=Path, help="folder of packages that are not installed")
    parser.add_argument(
        "--images", type=Path, help="of the last training: a folder, or a tar, of CLASS/IMAGE"
    )
    parser.add_argument("--size", help="of its encoder; none: what its images and the time allow")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--speed", help=argparse.SUPPRESS)
    parser.add_argument("--training", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rest", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--built", type=Path, help=argparse.SUPPRESS)
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
    if options.device is None and without_gpu(options):
        options.device = "cpu"
    return call(options)


if __name__ == "__main__":
    sys.exit(main())
