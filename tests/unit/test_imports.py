"""An import of `maect` changes nothing in the process; what commands do not wait for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import maect

ROOT = Path(__file__).parents[2]
STATE = """
import os, sys
umask = os.umask(0)
os.umask(umask)

def state():
    umask = os.umask(0)
    os.umask(umask)
    modules = {name: one for name, one in sys.modules.items() if name.split(".")[0] != "maect"}
    return [umask, dict(os.environ), [*sys.meta_path], [*sys.path_hooks], [*sys.path], modules]
"""
ALL = "for name in json.loads(sys.argv[1]): importlib.import_module(name)"


def run(script: str, *words: str) -> list[str]:
    """Return the lines that a Python of its own prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def modules() -> list[str]:
    """Return the names of all modules but `__main__`, which is a command."""
    root = Path(maect.__file__).parent
    files = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    names = [".".join(file.parts).removesuffix(".__init__") for file in sorted(files)]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.timeout(900)
def test_importing_changes_nothing_but_by_what_is_imported():
    """The package alone, then every module."""
    names = json.dumps(modules())
    script = f"""
{STATE}
import importlib.util, json, pathlib, typing  # which the package imports
before = state()
import maect
print(state() == before)
spec = importlib.util.find_spec("torch._dynamo.utils")
print(spec.origin.endswith("torch/_dynamo/utils.py"), type(spec.loader).__name__)
import maect.train.stage, maect.evaluate
try:
    maect.run_training("no/config.yaml")
except Exception as error:
    print(type(error).__name__, "no/config.yaml" in str(error))
{ALL}
print(json.dumps([name for name in sys.modules if name.split(".")[0] != "maect"]))
"""
    *said, others = run(script, names)
    assert said[:3] == ["True", "True SourceFileLoader", "UserError True"]
    script = f"""
import contextlib, importlib, json
{STATE}
for name in json.loads(sys.argv[2]):
    with contextlib.suppress(ImportError):  # some packages leave a name that none can import
        importlib.import_module(name)
import torch
functions = [dict(vars(module)) for module in (torch, torch.optim, torch.nn.functional)]
before = state()
{ALL}
after = state()
print([one == other for one, other in zip(before, after, strict=True)])
print([
    name
    for module, known in zip((torch, torch.optim, torch.nn.functional), functions)
    for name, value in known.items()
    if callable(value) and vars(module).get(name) is not value
])
"""
    said = run(script, names, others)
    assert said[-2:] == ["[True, True, True, True, True, True]", "[]"]


HEAVY = "torch numpy pandas pyarrow scipy sklearn PIL matplotlib"
LIGHT = {
    "the package": ("torch numpy", "import maect; maect.shards, maect.load"),
    "declarations": (f"{HEAVY} safetensors", "import maect.evaluate, maect.data.sources"),
    "what evaluates": ("torch sklearn",
        "from maect.evaluate import evaluation, low_shot, clustering"),
    "help": ("torch numpy pydantic yaml", "from maect import cli; cli.main(['--help'])"),
    "a launcher": ("torch numpy submitit", "import maect.launch"),
    "a plan": (f"{HEAVY} snakemake", "import maect.cli, maect.launch, maect.tools.plan"),
    "an experiment": (HEAVY, """
import maect.recipes
from maect.experiment import load, resolve, start
found = load("digits")
[resolve.run_config(found, run) for run in found.runs]
"""),
    "shards and vectors": ("torch", """
import tempfile
from pathlib import Path
import numpy as np
import maect.data.decode, maect.data.order, maect.data.shards
from maect.answers.vectors import Vectors, write_vectors
files, labels = ["a", "ü", "c"], ["x", "y", "x"]
values = np.arange(6, dtype=np.float32).reshape(3, 2)
with tempfile.TemporaryDirectory() as place:
    path = Path(place) / "v.parquet"
    write_vectors(path, [Vectors(files, values, labels, {"run": "r"})])
    back = Vectors.read(path)
assert (back.files, back.labels, back.about) == (files, labels, {"run": "r"})
assert np.array_equal(back.values, values)
"""),
    "a report on a login node": ("torch matplotlib.pyplot umap", """
import pkgutil
import maect.report
for module in pkgutil.walk_packages(maect.report.__path__, "maect.report."):
    __import__(module.name)
assert "maect.report.figures.lines" in sys.modules
"""),
}  # fmt: skip


@pytest.mark.parametrize("what", LIGHT)
def test_what_does_not_wait_for_large_packages(what):
    unwanted, code = LIGHT[what]
    script = f"import sys\n{code}\nprint(sorted({{*{unwanted.split()}}} & {{*sys.modules}}))"
    assert run(script)[-1] == "[]"
