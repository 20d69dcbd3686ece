"""Imports that take less time, PyTorch's without its compiler, and packages that can be called.

The compiler takes as long to import as PyTorch. Optimizers, timm and torchvision import it and
hardly use it.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
UTILS = f"{COMPILER}.utils"


@contextmanager
def uncollected() -> Iterator[None]:
    """Import, without searching what is being imported for garbage: a fifth of torch's time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def defer_compiler() -> None:
    """Put off the import of PyTorch's compiler until something of it is needed.

    Until then nothing is compiled, and `disable` and `graph_break`, which optimizers call, have
    nothing to do. A compiler that is imported already stays.
    """
    if COMPILER in sys.modules:
        return
    modules = {name: _Deferred(name) for name in (COMPILER, UTILS, f"{COMPILER}.trace_rules")}
    package, utils, rules = modules.values()
    package.__path__ = []  # it has modules, which `_Modules` finds
    package.__spec__ = ModuleSpec(COMPILER, None, is_package=True)
    vars(package).update(utils=utils, trace_rules=rules, disable=_disable, graph_break=_nothing)
    vars(utils)["is_compile_supported"] = lambda device: _real(UTILS).is_compile_supported(device)
    vars(rules)["clear_lru_cache"] = _nothing  # a process group does, and nothing is in it
    sys.modules |= modules
    sys.meta_path.insert(0, _Modules())


class _Deferred(ModuleType):
    """A module of the compiler that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules asks for nothing
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _deferred() -> bool:
    return isinstance(sys.modules.get(COMPILER), _Deferred)


def _real(name: str) -> ModuleType:
    for found in [name for name, module in sys.modules.items() if isinstance(module, _Deferred)]:
        del sys.modules[found]
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Modules)]
    return importlib.import_module(name)


def _nothing(*args: Any, **options: Any) -> None:
    """Do what the function of another name does where nothing is compiled."""


def _disable(fn: Any = None, *args: Any, **options: Any) -> Callable[..., Any]:
    """Do what the compiler's function of this name does, from when there is a compiler."""
    if not callable(fn):
        return lambda later: _disable(later, *args, **options)
    disabled: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*given: Any, **named: Any) -> Any:
        if _deferred():
            return fn(*given, **named)
        if not disabled:
            disabled.append(sys.modules[COMPILER].disable(fn, *args, **options))
        return disabled[0](*given, **named)

    return call


class _Modules(MetaPathFinder, Loader):
    """Imports the compiler before one of its modules, and gives that one if it came with it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}."):
            return None
        package = _real(COMPILER)
        # Python would import again what it finds among its modules.
        if module := sys.modules.pop(name, None):
            return ModuleSpec(name, self, loader_state=module)
        return PathFinder.find_spec(name, package.__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already."""


def make_callable(package: str) -> None:
    """Let a package be called as the function of its name, whose place Python gives it."""
    parent, _, name = package.rpartition(".")

    class Package(ModuleType):
        __call__ = staticmethod(getattr(sys.modules[parent], name))

    sys.modules[package].__class__ = Package
