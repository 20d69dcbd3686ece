"""Evaluations by name: a protocol, or a variant of one with settings of its own."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from maect.core.errors import UserError
from maect.core.names import did_you_mean
from maect.core.settings import one_line
from maect.evaluate.protocols import PROTOCOLS, Protocol
from maect.recipes import column, read_table


def evaluation_names() -> tuple[str, ...]:
    """Names of all evaluations: every protocol, and the variants of `evaluations.yaml`."""
    variants = [name for name in read_table("evaluations") if name != "columns"]
    return tuple(dict.fromkeys([*PROTOCOLS, *variants]))


def load_evaluation(
    name: str, size: str, overrides: Mapping[str, Any] | None = None
) -> tuple[str, Protocol]:
    """An evaluation's protocol and its settings for an encoder size.

    Args:
        name: a protocol or one of its variants; with the key `protocol` in `overrides`, any name.
        size: a column of `evaluations.yaml`.
        overrides: settings that differ.

    Returns:
        The name of the protocol, which is a module of `maect.evaluate`, and the settings.

    Raises:
        UserError: unknown evaluation, protocol or key, or a value out of range.
    """
    table = read_table("evaluations")
    own = {"columns": table["columns"], **table.get(name, {})}
    values = column(own, size, f"evaluation {name}") | dict(overrides or {})
    protocol = values.pop("protocol", name)
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, evaluation_names())
        raise UserError(f"unknown protocol {protocol!r}; {hint}")
    try:
        return protocol, PROTOCOLS[protocol].model_validate(values)
    except ValidationError as error:
        raise one_line(error, name) from None
