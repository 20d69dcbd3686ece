"""Printed names of architectures and methods, and explanations of words in tables."""

from pydantic.dataclasses import dataclass

from maect.paper import STRICT, read_paper


@dataclass(frozen=True, config=STRICT)
class _Titles:
    architectures: dict[str, str]
    methods: dict[str, str]
    published: frozenset[str]
    """Other methods, by their published checkpoints."""
    sweeps: dict[str, str]
    """Methods that differ in the value at their name's end."""
    glossary: dict[str, str]
    """Words of tables, by a column's or a method's title."""


_TITLES = read_paper("titles", _Titles)
ARCHITECTURES, METHODS = _TITLES.architectures, _TITLES.methods
PUBLISHED, GLOSSARY = _TITLES.published, _TITLES.glossary


def method_title(method: str) -> str:
    """Return how a method is printed; a name that the paper does not have stays unchanged."""
    sweep, _, value = method.rpartition("_")
    if sweep in _TITLES.sweeps:
        return f"{_TITLES.sweeps[sweep]} = {value}"
    return METHODS.get(method, method.replace("_", " "))


def architecture_title(architecture: str) -> str:
    """Return an architecture's name; `tiny_32` is one with images of another size."""
    size, _, pixels = architecture.rpartition("_")
    if architecture not in ARCHITECTURES and size in ARCHITECTURES and pixels.isdecimal():
        return f"{ARCHITECTURES[size]} ({pixels} px)"
    return ARCHITECTURES.get(architecture, architecture)
