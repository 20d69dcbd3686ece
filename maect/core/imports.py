"""Imports of two kinds: packages that can be called, and timm without torch's compiler.

timm hardly uses the compiler, which takes as long to import as torch.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"
UTILS = f"{DYNAMO}.utils"


def import_timm() -> None:
    """Import timm and torchvision; what they ask of the compiler waits until somebody calls it.

    torchvision names one function of it, and timm decorates one method. Everything else that is
    asked of it meanwhile imports it, as always. It changes nothing that is imported already.
    """
    if "timm" in sys.modules or DYNAMO in sys.modules:
        return
    with _deferred_compiler():
        importlib.import_module("timm")


@contextmanager
def _deferred_compiler() -> Iterator[None]:
    compiler: Any = importlib.import_module("torch.compiler")
    disable = compiler.disable
    package, utils = _Deferred(DYNAMO), _Deferred(UTILS)
    package.__path__ = []  # so that it has modules
    vars(utils)["is_compile_supported"] = _later(lambda: _real(UTILS).is_compile_supported)
    sys.modules |= {DYNAMO: package, UTILS: utils}
    compiler.disable = lambda fn=None, *given, **options: (
        _later(lambda: disable(fn, *given, **options), fn)
        if callable(fn)
        else disable(fn, *given, **options)
    )
    try:
        yield
    finally:
        compiler.disable = disable
        _forget()


class _Deferred(ModuleType):
    """A module of the compiler that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules asks for nothing
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> Any:
    _forget()
    return importlib.import_module(name)


def _forget() -> None:
    for name in (DYNAMO, UTILS):
        if isinstance(sys.modules.get(name), _Deferred):
            del sys.modules[name]


def _later(make: Callable[[], Any], like: Any = None) -> Callable[..., Any]:
    """A function that is made when it is first called."""
    made: list[Any] = []

    def call(*given: Any, **options: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](*given, **options)

    return wraps(like)(call) if like is not None else call


def make_callable(package: str) -> None:
    """Let a package be called as the function of its name, whose place Python gives it."""
    parent, _, name = package.rpartition(".")

    class Package(ModuleType):
        __call__ = staticmethod(getattr(sys.modules[parent], name))

    sys.modules[package].__class__ = Package
