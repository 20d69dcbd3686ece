"""Reads the hyper-parameter tables: one YAML file a recipe, one column an encoder size."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import ValidationError

from maect.core.errors import UserError
from maect.core.settings import one_line
from maect.recipes.settings import Encoder


@cache
def read_table(name: str) -> dict[str, Any]:
    """A YAML file of this package."""
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    files = resources.files(__package__).iterdir()
    names = {file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")}
    return tuple(sorted(names - {"encoders", "evaluations"}))


def sizes() -> tuple[str, ...]:
    """Names of the encoder sizes, smallest first."""
    return tuple(read_table("encoders")["columns"])


def column(table: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    """One column of a table: a list gives a value per column, anything else is for all."""
    columns = table["columns"]
    if column not in columns:
        raise UserError(f"{where}: no column {column!r}; it has {', '.join(columns)}")
    index = columns.index(column)

    def pick(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: pick(inner) for key, inner in value.items()}
        if not isinstance(value, list):
            return value
        if len(value) != len(columns):
            raise UserError(f"{where}: {value} has {len(value)} values for {len(columns)} columns")
        return value[index]

    return {key: pick(value) for key, value in table.items() if key not in ("columns", "stage")}


def load_encoder(size: str, image_size: int | None = None) -> Encoder:
    """The encoder of a size, for its own or another image size.

    Raises:
        UserError: unknown size, or an image size that the patches do not tile.
    """
    if size not in sizes():
        raise UserError(f"unknown encoder size {size!r}; known: {', '.join(sizes())}")
    values = column(read_table("encoders"), size, "encoders")
    if image_size is not None:
        values["image_size"] = image_size
    try:
        return Encoder.model_validate(values)
    except ValidationError as error:
        raise one_line(error, f"encoder {size}") from None
