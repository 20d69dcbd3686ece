"""Thirty random kills in each stage of the demo, and its bits compared with an undisturbed one's.

    python tests/end_to_end/random_kills.py FOLDER [--kills 30] [--table kills.csv]

SIGKILL hits in turn a rank, the launcher, Snakemake, and all processes at once: at any moment of a
step, as soon as a half-written state is seen, or while something starts. The same command follows
as often as Snakemake has ended. A run that completes is compared and, as long as there are kills
left, begun anew. `FOLDER/whole` has the undisturbed runs. Started again with the same table, it
goes on with the kills that are left.
"""

import argparse
import csv
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from mini_pipeline import ONE_RANK, ROOT, Pipeline

STAGES = {"pre-training": "mae_tiny", "head": "head_min_tiny", "tuning": "ct_min_tiny"}
VICTIMS = ("rank", "launcher", "Snakemake", "everything")
MOMENTS = ("step", "save", "step", "start", "save")
OFTEN = (("save_every_minutes: \"'0.25'\"", "save_every_minutes: \"'0.005'\""),)
"""A state every 0.3 s, so that there is one when a kill comes."""
LEFT_OUT = ("throughput", "status", "/state/", "/parts/", "/.")
"""Parts of names of what measures time, and of what is not kept."""
SAME = (".safetensors", ".tar", ".npy", ".npz", ".csv", ".md", ".txt")
"""Endings of files whose bytes no clock has a part in."""


def content(pipeline: Pipeline, below: str = "") -> dict[str, Any]:
    """Everything that a pipeline leaves and that no clock has a part in, by name."""
    left: dict[str, Any] = {}
    for path in sorted((pipeline.results / below).rglob("*")):
        name = str(path.relative_to(pipeline.results))
        if not path.is_file() or any(word in f"/{name}" for word in LEFT_OUT):
            continue
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            left[name] = [{k: v for k, v in line.items() if k != "timing"} for line in lines]
        elif path.name == "claims.csv":  # what a training cost is measured
            lines = path.read_bytes().splitlines()
            left[name] = [line for line in lines if b"cost." not in line]
        elif path.match("evaluations/*/*.json"):
            value = json.loads(path.read_text())
            left[name] = {key: value[key] for key in ("metrics", "settings")}
        elif path.suffix in SAME:
            left[name] = path.read_bytes()
    assert left, f"{pipeline.results / below} is empty"
    return left


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names whose content is not the same."""
    names = first.keys() | second.keys()
    return sorted(name for name in names if first.get(name) != second.get(name))


# ---- one run that is killed


class KilledRun:
    """One stage of the demo, from the finished stages before it to its own end."""

    def __init__(self, pipeline: Pipeline, run: str) -> None:
        self.pipeline = pipeline
        self.folder = pipeline.results / "runs" / run
        self.snakemake: subprocess.Popen[str] | None = None
        self.failures = 0  # ends of Snakemake since the last kill

    def goes_on(self) -> bool:
        """Whether the run is not complete yet; starts Snakemake anew if that has ended."""
        if self.snakemake is not None and self.snakemake.poll() == 0:
            return False
        if self.snakemake is None or self.snakemake.poll() is not None:
            self.failures += 1
            if self.failures > 3:
                log = (self.pipeline.folder / "snakemake.log").read_text()
                raise SystemExit(f"Snakemake fails without a kill:\n{log[-5000:]}")
            self.snakemake = self.pipeline.start(str(self.folder / "done"))
        return True

    def steps(self) -> int:
        """Number of updates that are logged."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def half_written(self) -> bool:
        """Whether a state is being written, or was left half written."""
        states = self.folder.glob("state/step-*")
        return any(not (state / "state.json").exists() for state in states)

    def is_saving(self) -> bool:
        """Whether a rank is writing its part of a state just now."""
        return any(self.folder.glob("state/step-*/.rank-*.tmp"))

    def waits_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the run was completed first."""
        while not condition():
            if not self.goes_on():
                return False
            time.sleep(0.002)
        return True

    def processes(self, victim: str) -> list[psutil.Process]:
        """Live processes that a kill may hit."""
        signs = {"rank": "-m maect.launch.worker ", "launcher": "maect train ", "everything": ""}
        if victim == "Snakemake":
            assert self.snakemake is not None
            return [psutil.Process(self.snakemake.pid)] if self.snakemake.poll() is None else []
        found = []
        for process in self.pipeline.processes():
            try:
                words = " ".join(process.cmdline()) + " "
            except psutil.Error:
                continue
            is_shell = words.startswith(("/bin/bash", "bash"))
            if signs[victim] in words and (victim == "everything" or not is_shell):
                found.append(process)
        return found

    def strike(self, victim: str, moment: str, dice: random.Random) -> dict[str, Any] | None:
        """Kill at a random moment; return what was killed, or None if the run was complete."""
        goal = self.steps() + dice.randint(2, 25)
        if moment == "start":
            until = time.monotonic() + dice.uniform(0, 8)
            reached = self.waits_for(lambda: time.monotonic() >= until)
        else:
            reached = self.waits_for(lambda: self.steps() >= goal)
        if moment == "save":
            reached = reached and self.waits_for(self.is_saving)
        elif moment == "step":
            time.sleep(dice.uniform(0, 0.2))
        if not reached or not self.waits_for(lambda: bool(self.processes(victim))):
            return None
        hit = self.processes(victim)
        if not hit:
            return None
        if victim != "everything":
            hit = [dice.choice(hit)]
        for process in hit:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if victim == "everything" and self.snakemake is not None:
            self.snakemake.wait()
            self.pipeline.kill_everything()  # what was being started at that moment
        self.failures = 0
        return {
            "killed": victim, "moment": moment, "processes": len(hit), "steps logged": self.steps(),
            "half-written state": self.half_written(),
        }  # fmt: skip


def kill_stage(
    stage: str, whole: Pipeline, folder: Path, kills: int, done: int
) -> list[dict[str, Any]]:
    """Run a stage once, with so many kills at most; what was killed, and how it ended."""
    run = STAGES[stage]
    names = list(STAGES.values())
    broken = Pipeline(folder / "broken", whole.experiment, (*ONE_RANK, *OFTEN))
    broken.kill_everything()
    shutil.rmtree(broken.folder, ignore_errors=True)
    for name in ("images", "shards", *(f"runs/{one}" for one in names[: names.index(run)])):
        shutil.copytree(whole.results / name, broken.results / name)
    dice = random.Random(f"{stage} {done}")
    attempt = KilledRun(broken, run)
    rows: list[dict[str, Any]] = []
    order = islice(zip(cycle(VICTIMS), cycle(MOMENTS), strict=False), done, done + kills)
    for victim, moment in order:
        if not attempt.goes_on() or (row := attempt.strike(victim, moment, dice)) is None:
            break
        rows.append({"stage": stage, **row})
        print(rows[-1], flush=True)
    attempt.waits_for(lambda: False)
    found = differing(content(whole, f"runs/{run}"), content(broken, f"runs/{run}"))
    for row in rows:
        row["end"] = f"differs: {' '.join(found)}" if found else "same bits"
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30, help="in each stage")
    parser.add_argument("--table", type=Path, help="default: FOLDER/kills.csv")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    digits = yaml.safe_load((ROOT / "workflow/experiments/digits.yaml").read_text())
    experiment = {key: digits[key] for key in ("datasets", "online_evaluation", "runs")}
    whole = Pipeline(folder / "whole", experiment)
    stamps = [str(whole.results / "runs" / run / "done") for run in STAGES.values()]
    whole.complete(*stamps, timeout=3600)
    table = options.table or folder / "kills.csv"
    text = table.read_text() if table.exists() else ""
    rows: list[dict[str, Any]] = list(csv.DictReader(text.splitlines()))
    for stage in STAGES:
        while (struck := sum(row["stage"] == stage for row in rows)) < options.kills:
            rows += kill_stage(stage, whole, folder, options.kills - struck, struck)
            with table.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    bad = [row for row in rows if row["end"] != "same bits"]
    print(f"{len(rows)} kills; {len(bad)} in runs that ended with other bits")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
