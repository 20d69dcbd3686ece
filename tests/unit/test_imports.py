"""An import of `maect` changes nothing in the process; what commands do not wait for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import maect

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


def run(script: str, *words: str) -> str:
    """Return what a Python of its own prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    """Return the names of all modules but `__main__`, which is a command."""
    root = Path(maect.__file__).parent
    files = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    names = [".".join(file.parts).removesuffix(".__init__") for file in sorted(files)]
    return [name for name in names if not name.endswith("__main__")]


def test_importing_the_package_changes_nothing() -> None:
    script = f"""
{STATE}
import importlib.util, pathlib, typing  # which the package imports
before = state()
import maect
print(state() == before)
spec = importlib.util.find_spec("torch._dynamo.utils")
print(spec.origin.endswith("torch/_dynamo/utils.py"), type(spec.loader).__name__)
"""
    assert run(script).splitlines() == ["True", "True SourceFileLoader"]


@pytest.mark.timeout(900)
def test_importing_any_module_changes_nothing_but_by_what_it_imports() -> None:
    imports = "import importlib\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)"
    names = json.dumps(modules())
    script = f"""
import json, sys
{imports}
print("names", json.dumps([name for name in sys.modules if name.split(".")[0] != "maect"]))
"""
    others = json.loads(run(script, names).rpartition("names ")[2])
    script = f"""
import contextlib, importlib, json
{STATE}
for name in json.loads(sys.argv[2]):
    with contextlib.suppress(ImportError):  # some packages leave a name that none can import
        importlib.import_module(name)
import torch
functions = [dict(vars(module)) for module in (torch, torch.optim, torch.nn.functional)]
before = state()
{imports}
after = state()
print("same", [one == other for one, other in zip(before, after, strict=True)])
print([
    name
    for module, known in zip((torch, torch.optim, torch.nn.functional), functions)
    for name, value in known.items()
    if callable(value) and vars(module).get(name) is not value
])
"""
    said = run(script, names, json.dumps(others)).rpartition("same ")[2].splitlines()
    assert said == ["[True, True, True, True, True, True]", "[]"]


def test_the_functions_are_there_beside_their_packages() -> None:
    script = """
import maect, maect.train.stage, maect.evaluate
print(callable(maect.train), callable(maect.evaluate), maect.train.stage.__name__)
try:
    maect.train("no/config.yaml")
except Exception as error:
    print(type(error).__name__, "no/config.yaml" in str(error))
"""
    assert run(script).splitlines() == ["True True maect.train.stage", "UserError True"]


def test_vectors_are_written_and_read_without_torch() -> None:
    script = """
import sys, tempfile
from pathlib import Path
import numpy as np
from maect.answers.vectors import Vectors, write_vectors
values = np.arange(6, dtype=np.float32).reshape(3, 2)
with tempfile.TemporaryDirectory() as place:
    path = Path(place) / "v.parquet"
    given = Vectors(["a", "\u00fc", "c"], values, ["x", "y", "x"], {"run": "r"})
    write_vectors(path, [given])
    back = Vectors.read(path)
print(back.files, back.labels, back.about, np.array_equal(back.values, values))
print("torch" in sys.modules)
"""
    assert run(script).splitlines() == [
        "['a', 'ü', 'c'] ['x', 'y', 'x'] {'run': 'r'} True", "False",
    ]  # fmt: skip


@pytest.mark.parametrize("module", ["maect.data.shards", "maect.data.order", "maect.data.decode"])
def test_shards_are_written_without_torch(module: str) -> None:
    assert run(f"import sys, {module}; print('torch' in sys.modules)") == "False\n"
