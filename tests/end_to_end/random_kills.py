"""Random kills of a whole pipeline, and its results compared with those of an undisturbed one.

    python tests/end_to_end/random_kills.py FOLDER [--kills 300] [--experiment mini|NAME|PATH]

FOLDER has `whole`, the undisturbed pipeline, and `broken`, which is killed and started again until
it is complete, again and again; `kills.jsonl` names every kill, with the seed of its round, and
every comparison. Started again with the same FOLDER, it goes on where it was.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from mini_pipeline import MINI, ROOT, Pipeline

ALL = {
    "runs": MINI["runs"]
    | {
        "refine_heads_tiny": {
            "recipe": "refine_heads", "size": "tiny", "from": "mae_tiny", "set": {"epochs": 2},
        },
        "refine_tiny": {
            "recipe": "refine", "size": "tiny", "from": "refine_heads_tiny", "set": {"epochs": 3},
        },
    },
    "evaluate": [
        {"runs": ["refine_tiny"], "protocols": ["knn", "knn_per_block"]},
        {
            "runs": ["ct_min_tiny"],
            "protocols": [
                "knn", "linear_probe", "low_shot", "clustering", "umap", "efficient_probe",
                "effective_invariance", "retrieval", "color_histogram", "fine_tune_10pct",
            ],
        },
    ],
    "protocols": {
        "linear_probe": {"batch_size": 256, "epochs": 2},
        "efficient_probe": {"batch_size": 64, "base_lr": 32, "epochs": 2, "warmup_epochs": 1},
        "color_histogram": {"epochs": 2, "batch_size": 256},
        "fine_tune_10pct": {"epochs": 4},
    },
    "tables": {"low_shot": ["ct_min_tiny"], "clustering": ["ct_min_tiny"]},
}  # fmt: skip
KINDS = ("everything", "one process", "a node")
TIMED = ("throughput", "status")
"""Parts of names of what measures time, and is never the same."""


def victims(pipeline: Pipeline, kind: str, dice: random.Random) -> list[psutil.Process]:
    """Whom a kill hits: a node is all ranks of one job, with what looks after them there."""
    processes = pipeline.processes()
    if kind == "everything" or not processes:
        return processes
    if kind == "one process":
        return [dice.choice(processes)]
    jobs = sorted({job for process in processes if (job := job_of(process))})
    if not jobs:
        return [dice.choice(processes)]
    job = dice.choice(jobs)
    return [process for process in processes if job_of(process) == job]


def job_of(process: psutil.Process) -> str:
    """The job that a process belongs to, if it is a rank or looks after ranks."""
    try:
        return str(process.environ().get("MAECT_JOB", ""))
    except psutil.Error:
        return ""


def role(process: psutil.Process) -> str:
    """What a process is, in a word or two."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return "gone"
    for sign, name in {
        "submitit.core._submit": "rank", "-m maect.launch": "rank",
        "snakemake": "Snakemake", "/maect ": "launcher",
    }.items():  # fmt: skip
        if sign in words:
            return name
    return "other"


def content(pipeline: Pipeline) -> dict[str, Any]:
    """Everything that a pipeline leaves and that no clock has a part in, by name."""
    root, left = pipeline.results, {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        parts = path.relative_to(root).parts
        if not path.is_file() or any(word in name for word in TIMED):
            continue
        if path.suffix in (".safetensors", ".tar", ".npy", ".npz", ".csv", ".md") or (
            parts[0] == "shards" and path.suffix == ".txt"
        ):
            if "state" not in parts and "parts" not in parts and not path.name.startswith("."):
                left[name] = path.read_bytes()
            if path.name == "claims.csv":  # what a training cost is measured
                lines = path.read_bytes().splitlines()
                left[name] = [line for line in lines if b"cost." not in line]
        elif path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            left[name] = [{k: v for k, v in line.items() if k != "timing"} for line in lines]
        elif parts[0] == "evaluations" and path.suffix == ".json" and len(parts) == 3:
            value = json.loads(path.read_text())
            left[name] = {key: value[key] for key in ("metrics", "settings")}
    return left


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names whose content is not the same."""
    return sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )


def rounds(folder: Path, experiment: dict[str, Any], seed: int, mean: float) -> Iterator[dict]:
    """Endless rounds of kills; what happened, one by one."""
    whole, broken = (Pipeline(folder / name, experiment) for name in ("whole", "broken"))
    if not (folder / "whole" / "complete").exists():
        done = whole.run("report", "evaluations", timeout=36000)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        (folder / "whole" / "complete").touch()
    expected = content(whole)
    while True:
        dice = random.Random(seed)
        broken.kill_everything()
        broken.folder.mkdir(exist_ok=True)
        started = broken.start("report", "evaluations")
        while True:
            wait = dice.expovariate(1 / mean)
            deadline = time.monotonic() + wait
            while started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if started.poll() is not None:
                if started.returncode == 0:
                    break
                started = broken.start("report", "evaluations")  # what was killed has ended it
                continue
            kind = dice.choice(KINDS)
            hit = victims(broken, kind, dice)
            roles = Counter(map(role, hit))
            running = sorted(path.parent.name for path in broken.results.glob("*/*/job.json"))
            for process in hit:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            yield {"seed": seed, "kind": kind, "after": round(wait, 2), "killed": roles,
                   "begun": len(running)}  # fmt: skip
            if kind == "everything":
                started.wait()
                started = broken.start("report", "evaluations")
        yield {
            "seed": seed,
            "compared": len(expected),
            "differ": differing(expected, content(broken)),
        }
        shutil.rmtree(broken.folder)
        seed += 1


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--mean", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--experiment", default="mini")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.experiment == "mini":
        experiment = MINI | ALL
    else:
        named = ROOT / "workflow" / "experiments" / f"{options.experiment}.yaml"
        file = named if named.exists() else Path(options.experiment)
        experiment = yaml.safe_load(file.read_text())
    log = folder / "kills.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    kills = sum("kind" in line for line in lines)
    # A round that this script was interrupted in goes on with kills of its own.
    seed = max((line["seed"] for line in lines), default=-1) + 1
    for line in rounds(folder, experiment, seed, options.mean):
        with open(log, "a") as file:
            file.write(json.dumps(line) + "\n")
        kills += "kind" in line
        if line.get("differ"):
            raise SystemExit(f"seed {line['seed']}: {line['differ']} differ; see {folder}")
        if "compared" in line and kills >= options.kills:
            print(f"{kills} kills; results as without any")
            return


if __name__ == "__main__":
    os.nice(19)
    main()
