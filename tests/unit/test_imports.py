"""What commands do not wait for: PyTorch's compiler until it is needed, pandas, garbage."""

import gc
import subprocess
import sys

import pytest

from maect.core.imports import uncollected


def run(script: str) -> str:
    """What a Python of its own prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_training_does_not_import_the_compiler() -> None:
    script = """
import sys
import maect.train.trainer, maect.answers.encoder
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weights = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weights])
weights.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print(type(sys.modules["torch._dynamo"]).__name__, "sympy" in sys.modules)
"""
    assert run(script).splitlines() == ["_Deferred False"]


def test_what_was_put_off_gives_the_real_answer() -> None:
    script = """
import maect.models.vit
import sys, torch, torchvision
given = sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu")
from torch._dynamo.utils import is_compile_supported
print(given == is_compile_supported("cpu"), sys.modules["torch._dynamo"].__file__ is not None)
from timm.models.naflexvit import NaFlexRopeIterator
print(NaFlexRopeIterator.__next__.__name__)
"""
    assert run(script).splitlines() == ["True True", "__next__"]


@pytest.mark.parametrize(
    "ask", ["torch._dynamo.config.cache_size_limit", "torch._dynamo.trace_rules.BUILTIN_SKIPLIST"]
)
def test_what_is_asked_for_is_the_real_compiler(ask: str) -> None:
    script = f"""
import maect
import torch, torch._dynamo, torch._dynamo.utils
import inspect
inspect.getmodule(len)  # looks through all modules
print(type(sys.modules["torch._dynamo"]).__name__)
first = {ask}
print(type(sys.modules["torch._dynamo"]).__name__)
import torch._dynamo
print(first is {ask} or first == {ask})
"""
    assert run("import sys\n" + script).splitlines() == ["_Deferred", "module", "True"]


def test_a_module_of_the_compiler_is_imported_once() -> None:
    script = """
import maect
import sys
import torch, torch._dynamo.backends.registry as module
print(module is torch._dynamo.backends.registry is sys.modules["torch._dynamo.backends.registry"])
import torch._dynamo.config as module  # which takes no attributes of the import system
print(module is torch._dynamo.config, torch._dynamo is sys.modules["torch._dynamo"])
print([one for one in sys.meta_path if type(one).__module__.startswith("maect")])
"""
    assert run(script).splitlines() == ["True", "True True", "[]"]


def test_what_is_not_to_be_compiled_is_not() -> None:
    """Neither what was decorated, nor what was called, before there was a compiler."""
    script = """
import maect
import torch
seen = []
@torch.compiler.disable
def aside(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1
@torch.compiler.disable(recursive=False)
def other(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1
print(aside(torch.ones(1)).item(), other(torch.ones(1)).item(), aside.__name__, seen)
double = torch.compile(lambda x: other(aside(x)) * 2, backend="eager")
print(double(torch.ones(1)).item(), seen)
"""
    assert run(script).splitlines() == [
        "2.0 2.0 aside [False, False]",
        "6.0 [False, False, False, False]",
    ]


def test_it_leaves_alone_a_compiler_that_is_there() -> None:
    script = """
import torch, torch._dynamo
before = torch._dynamo
import maect, maect.models.vit
print(torch._dynamo is before)
"""
    assert run(script).splitlines() == ["True"]


def test_vectors_are_written_and_read_without_torch_or_pandas() -> None:
    script = """
import sys, tempfile
from pathlib import Path
import numpy as np
from maect.answers.vectors import Vectors, write_vectors
values = np.arange(6, dtype=np.float32).reshape(3, 2)
with tempfile.TemporaryDirectory() as place:
    path = Path(place) / "v.parquet"
    given = Vectors(["a", "\u00fc", "c"], values, ["x", "y", "x"], {"run": "r"})
    write_vectors(path, [given], 3)
    back = Vectors.read(path)
print(back.files, back.labels, back.about, np.array_equal(back.values, values))
print("torch" in sys.modules, "pandas" in sys.modules)
"""
    assert run(script).splitlines() == [
        "['a', 'ü', 'c'] ['x', 'y', 'x'] {'run': 'r'} True", "False False",
    ]  # fmt: skip


def test_garbage_is_looked_for_again_after_an_import() -> None:
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(ImportError), uncollected():
                assert not gc.isenabled()
                raise ImportError
            assert gc.isenabled() is before
        finally:
            gc.enable()
