"""timm is imported without torch's compiler, and nothing that needs the compiler notices."""

import subprocess
import sys

import pytest


def run(script: str) -> str:
    """What a Python of its own prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_compiler_is_not_imported_and_works_when_it_is() -> None:
    script = """
import sys, torch
import maect.models.vit
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
# What was put off gives the real answer.
import torchvision
roi_align = sys.modules["torchvision.ops.roi_align"]
given = roi_align.is_compile_supported("cpu")
from torch._dynamo.utils import is_compile_supported
print(given == is_compile_supported("cpu"), sys.modules["torch._dynamo"].__file__ is not None)
from timm.models.naflexvit import NaFlexRopeIterator
print(NaFlexRopeIterator.__next__.__name__)
# The compiler compiles, and leaves alone what it is told to.
seen = []
@torch.compiler.disable
def aside(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1
print(torch.compile(lambda x: aside(x) * 2, backend="eager")(torch.ones(2)).tolist(), seen)
from timm.layers import resample_abs_pos_embed
from torchvision.models.feature_extraction import create_feature_extractor
print(torch.compiler.disable.__module__)
"""
    assert run(script).splitlines() == [
        "False False", "True True", "__next__", "[4.0, 4.0] [False]", "torch.compiler",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ask", ["torch._dynamo.config.cache_size_limit", "torch._dynamo.utils.counters"]
)
def test_what_is_asked_for_meanwhile_is_the_real_compiler(ask: str) -> None:
    script = f"""
import sys, torch
from maect.core.imports import _deferred_compiler
with _deferred_compiler():
    import inspect
    import torch._dynamo, torch._dynamo.utils
    inspect.getmodule(len)  # looks through all modules
    print(type(sys.modules["torch._dynamo"]).__name__)
    first = {ask}
    print(type(sys.modules["torch._dynamo"]).__name__)
import torch._dynamo
print(first is {ask} or first == {ask})
"""
    assert run(script).splitlines() == ["_Deferred", "module", "True"]


def test_a_deferred_method_is_not_compiled() -> None:
    script = """
import torch
from maect.core.imports import _deferred_compiler
seen = []
with _deferred_compiler():
    @torch.compiler.disable
    def aside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1
print(aside(torch.ones(1)).item(), aside.__name__)
print(torch.compile(lambda x: aside(x) * 2, backend="eager")(torch.ones(1)).item(), seen)
"""
    assert run(script).splitlines() == ["2.0 aside", "4.0 [False, False]"]
