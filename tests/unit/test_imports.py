"""An import of `maect` changes nothing in the process; what commands do not wait for."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import maect

ROOT = Path(__file__).parents[2]
STATE = """
import os, sys

def state():
    umask = os.umask(0)
    os.umask(umask)
    modules = {name: one for name, one in sys.modules.items() if name.split(".")[0] != "maect"}
    patchable = ("torch", "torch.optim", "torch.nn.functional")
    contents = [vars(modules[name]) for name in patchable if name in modules]
    functions = [{name: one for name, one in part.items() if callable(one)} for part in contents]
    places = [*sys.meta_path], [*sys.path_hooks], [*sys.path]
    return [umask, dict(os.environ), *places, functions, modules]
"""


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


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports when it is imported, and its names from there."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.timeout(900)
def test_importing_changes_nothing_but_by_what_is_imported():
    """The package alone, then every module where all other packages are imported."""
    script = f"""
{STATE}
import importlib.readers, importlib.util, json, pathlib, pkgutil, typing  # which maect imports
before = state()
import maect
print(state() == before)
spec = importlib.util.find_spec("torch._dynamo.utils")
print(spec.origin.endswith("torch/_dynamo/utils.py"), type(spec.loader).__name__)
for name in json.loads(sys.argv[1]):
    pkgutil.resolve_name(name)
before = state()
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
after = state()
print([one == other for one, other in zip(before, after, strict=True)])
print(sorted({{*before[-1]}} ^ {{*after[-1]}}))
try:
    maect.run_training("no/config.yaml")
except Exception as error:
    print(type(error).__name__, "no/config.yaml" in str(error))
"""
    files = Path(maect.__file__).parent.rglob("*.py")
    names = {name for file in files for name in imported(ast.parse(file.read_bytes()))}
    others = sorted(name for name in names if name.split(".")[0] != "maect")
    said = run(script, json.dumps(others), json.dumps(modules()))
    assert said[:2] == ["True", "True SourceFileLoader"]
    assert said[2:] == [str([True] * 7), "[]", "UserError True"]


HEAVY = "torch numpy pandas pyarrow scipy sklearn PIL matplotlib"
LIGHT = {
    "the package": ("torch numpy", "import maect; maect.shards, maect.load"),
    "declarations": (f"{HEAVY} safetensors", "import maect.evaluate, maect.data.sources"),
    "what evaluates": ("torch sklearn",
        "from maect.evaluate import evaluation, knn, low_shot, clustering"),
    "help": ("torch numpy pydantic yaml", "from maect import cli; cli.main(['--help'])"),
    "a launcher": ("torch numpy submitit", "import maect.launch"),
    "a plan": (f"{HEAVY} snakemake", "import maect.cli, maect.launch, maect.tools.plan"),
    "an experiment": (HEAVY, """
import maect.recipes
from maect.experiment import load, pipeline, resolve, start
found = load("digits")
[resolve.run_config(found, run) for run in found.runs]
"""),
    "shards and vectors": ("torch", """
import tempfile
from pathlib import Path
import numpy as np
import maect.data.decode, maect.data.order, maect.data.shards
from maect.answers.vectors import Vectors, write_vectors
with tempfile.TemporaryDirectory() as place:
    path = Path(place) / "v.parquet"
    write_vectors(path, [Vectors(["ü"], np.ones((1, 2), np.float32), ["x"], {"run": "r"})])
    assert Vectors.read(path).files == ["ü"]
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
