"""How many modules know a setting, from YAML to the kernel, and a run, from YAML to a cell."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import maect
from maect.experiment.load import load
from maect.experiment.resolve import run_config
from maect.stages.objectives import Views, ViewsObjective
from maect.stages.run import RunConfig
from maect.stages.tune import Tune

PACKAGE = Path(maect.__file__).parent
SETTING, TOPK = "topk", 7


def named(tree: ast.AST) -> Iterator[ast.AST]:
    """Where a module names the setting; not the method of tensors that is called so, nor prose."""
    methods = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if id(node) not in methods:
                found = name
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                found = name
            case ast.Constant(value=str(name)):
                found = name
            case _:
                continue
        if found == SETTING:
            yield node


def holds(value: Any, depth: int = 4) -> bool:
    """Whether untyped values have the setting among them."""
    if isinstance(value, Mapping) and depth:
        return SETTING in value or any(holds(inner, depth - 1) for inner in value.values())
    return False


def passing(go: Any) -> set[str]:
    """Modules with a function that is given its value, alone or in a mapping, while `go` runs."""
    modules = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or PACKAGE not in path.parents:
            return
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        for name in frame.f_code.co_varnames[:count]:
            value = frame.f_locals.get(name)
            if name == SETTING or (name, value) == ("k", TOPK) or holds(value):
                modules.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(watch)
    try:
        go()
    finally:
        sys.setprofile(None)
    return modules


def from_yaml_to_the_kernel(folder: Path) -> None:
    """An experiment is read, a run resolved, its file written and read, a step taken."""
    file = folder / "results/runs/ct/config.yaml"
    file.parent.mkdir(parents=True)
    experiment = {
        "storage": str(folder / "results"),
        "datasets": {"mine": {"splits": {"train": {"images": "/images"}}}},
        "runs": {
            "mae": {"recipe": "mae", "size": "tiny"},
            "ct": {
                "recipe": "ct_min",
                "size": "tiny",
                "from": "mae",
                "set": {"head": {SETTING: TOPK}},
            },
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(experiment))
    run_config(load(str(folder / "mine.yaml")), "ct").write(file)
    config = RunConfig.read(file)
    assert isinstance(config.settings, Tune) and config.settings.head.topk == TOPK
    objective: ViewsObjective = config.settings.objective(config.encoder, seed=0)  # type: ignore[assignment]
    ids, pixels = np.arange(4), config.encoder.pixels
    drawn = objective.draw(np.zeros(4, np.int64), ids)
    images = torch.rand(2, 4, pixels.channels, *[config.encoder.image_size] * 2)
    labels = torch.zeros(4, dtype=torch.int64)
    views = Views((images,), None, torch.from_numpy(ids), labels, drawn["neighbors"])
    loss, _ = objective(views)
    assert loss.isfinite()


def test_few_modules_know_a_setting(tmp_path: Path) -> None:
    namers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(named(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert namers == {
        "recipes/__init__.py",  # declares and checks it
        "stages/objectives.py",  # draws which of the neighbours
        "models/heads.py",
        "models/refiner.py",
        "tools/own_training.py",  # chooses it for a folder of images
    }
    passed_on = passing(lambda: from_yaml_to_the_kernel(tmp_path))
    # The other kind of head, and tools beside this way.
    beside = {"models/refiner.py", "tools/own_training.py"}
    assert {"models/heads.py", "data/random.py"} < passed_on
    assert len(passed_on | (namers - beside)) <= 9, sorted(passed_on)


@pytest.mark.slow
def test_few_modules_know_a_run(tmp_path: Path) -> None:
    """Of those that know what a run is: `core` reads and writes files of any kind."""
    script = Path(__file__).with_name("way_of_a_run.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    shown = pd.read_csv(StringIO(found["table"]))
    assert shown.method.tolist() == ["followed"] and 0 <= shown.knn[0] <= 100
    modules = [
        name for name in found["modules"] if name.endswith(".py") and not name.startswith("core/")
    ]
    # Where it is declared, resolved, trained, evaluated, shown.
    assert {
        "experiment/expand.py", "experiment/resolve.py", "train/trainer.py", "evaluate/knn.py",
        "report/tables.py",
    } < set(modules)  # fmt: skip
    assert len(modules) <= 28, modules
