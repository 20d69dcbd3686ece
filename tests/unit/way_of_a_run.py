"""Follows one run from YAML to a table's cell, and prints which modules know it, as JSON.

A module knows a run if one of its functions is given it: its name, its folder, its resolved file,
or typed settings that hold one of these. The launcher is left out: jobs run in this process.

    python tests/unit/way_of_a_run.py FOLDER
"""

import dataclasses
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from pydantic import BaseModel

import maect
from maect.core.context import Context
from maect.data.shards import shard
from maect.experiment.load import load
from maect.experiment.pages import make_page, pages
from maect.experiment.resolve import files
from maect.launch import Task
from maect.tools import jobs
from maect.tools.job_commands import evaluate, features, train
from maect.tools.launching import Launching

sys.path.insert(0, str(Path(__file__).parent / "train"))
from tiny_runs import noise_shards

PACKAGE = Path(maect.__file__).parent
RUN = "followed"


def is_run(value: Any, depth: int = 2) -> bool:
    """Whether a value is the run, or holds it."""
    if isinstance(value, Path):
        return value.name == RUN or (value.parent.name == RUN and value.suffix == ".yaml")
    inner: list[Any] = []
    if isinstance(value, BaseModel):
        inner = [getattr(value, name) for name in type(value).model_fields]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        inner = list(value)
    return (
        value == RUN
        if isinstance(value, str)
        else depth > 0 and any(is_run(one, depth - 1) for one in inner)
    )


@functools.cache
def module_of(file: str) -> str | None:
    """A module of the package, such as `train/trainer.py`, by its file."""
    path = Path(file)
    return str(path.relative_to(PACKAGE)) if PACKAGE in path.parents else None


def from_yaml_to_a_cell(folder: Path) -> Path:
    """Resolve an experiment of one run, train it, evaluate it and show it in a table."""
    root, launching = folder / "results", Launching()
    experiment = load(str(folder / "mine.yaml"))
    tables = [(path, config) for path, config in pages(experiment) if path.parts[-2] == "tables"]
    for path, config in [*files(experiment), *tables]:
        config.write(path)
    train(root / "runs" / RUN / "config.yaml", launching=launching)
    for path in sorted((root / "features" / RUN).glob("*.yaml")):
        features(path, launching=launching)
    evaluate(root / "evaluations" / RUN / "knn.yaml", launching=launching)
    for path, _ in tables:
        make_page(path)
    return root / "tables/low_shot.csv"


def here(kind: str, folder: Path, task: Task, *others: Any) -> None:
    """Call a launched function in this process."""
    module, name = task.function.split(":")
    getattr(importlib.import_module(module), name)(Context(), **task.arguments)


def main(folder: Path) -> None:
    noise_shards(folder, 40)
    for split in ("train", "val"):
        shard(folder / "images", folder / "results/shards/mine" / split, "folder", 1)
    given = {"images": str(folder / "images"), "shards": 1}
    experiment = {
        "storage": str(folder / "results"),
        "datasets": {"mine": {"resize": 16, "splits": {"train": given, "val": given}}},
        "runs": {RUN: {"recipe": "mae", "size": "tiny", "set": {"epochs": 1, "batch_size": 16}}},
        "evaluate": [{"runs": [RUN], "protocols": ["knn"]}],
        "tables": {"low_shot": [RUN]},
        "compare_with_paper": False,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(experiment))
    jobs.run_job = here
    os.environ["LOCAL_RANK"] = "0"  # for DeepSpeed, which the launcher tells it
    known = set[str]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or (module := module_of(code.co_filename)) is None or module in known:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_run(frame.f_locals.get(name)) for name in names if name not in ("self", "cls")):
            known.add(module)

    sys.setprofile(watch)
    try:
        table = from_yaml_to_a_cell(folder)
    finally:
        sys.setprofile(None)
    print(json.dumps({"modules": sorted(known), "table": table.read_text()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
