"""Content of the paper as data: printed numbers, compared methods and data sets."""

from importlib import resources
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter

from maect.core.yaml_files import parse_yaml

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid")
FOLDER = resources.files(__package__)


def read_paper(name: str, kind: type[T]) -> T:
    """Read `NAME.yaml` of this folder.

    Args:
        name: of the file.
        kind: type of its content.
    """
    text = FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return TypeAdapter(kind).validate_python(parse_yaml(text, name))
