"""Groups of classes, such as animals and vehicles, for figures of more classes than colours."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from maect.core.errors import UserError
from maect.core.yaml_files import read_yaml


def _apart(groups: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    seen: dict[str, str] = {}
    for group, classes in groups.items():
        for name in classes:
            if seen.setdefault(name, group) != group:
                raise ValueError(f"class {name!r} is in {seen[name]!r} and in {group!r}")
    return groups


Groups = Literal["imagenet"] | Annotated[dict[str, list[str]], AfterValidator(_apart)]
"""Classes by the name of their group, or the list of that name in this package."""


def group_names(groups: Groups) -> list[str]:
    """Names of all groups, in their order."""
    return list(_listed() if groups == "imagenet" else groups)


def group_numbers(groups: Groups, classes: Sequence[str], where: str) -> list[int]:
    """Number of each class's group; -1: it is in none."""
    listed = _listed() if groups == "imagenet" else groups
    numbers = {name: number for number, group in enumerate(listed.values()) for name in group}
    for name in numbers:
        if groups != "imagenet" and name not in classes:
            raise UserError(f"groups: {where} has no class {name!r}")
    return [numbers.get(name, -1) for name in classes]


@cache
def _listed() -> dict[str, list[str]]:
    return read_yaml(Path(__file__).with_name("imagenet_groups.yaml"))
