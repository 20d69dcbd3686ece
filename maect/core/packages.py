"""Packages that can be called as the function whose name they share."""

import sys
from types import ModuleType


def make_callable(package: str) -> None:
    """Let a package be called as the function of its parent that has its name.

    Python binds `maect.train` to the package once one of its modules is imported, in place of the
    function. A class of its own for a module is Python's documented way to give it a behaviour.
    """
    parent, _, name = package.rpartition(".")
    function = getattr(sys.modules[parent], name)

    class Package(ModuleType):
        __call__ = staticmethod(function)

    sys.modules[package].__class__ = Package
