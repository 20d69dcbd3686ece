"""Prints recipes and evaluations as the paper does: `python -m maect.recipes ct_min ct_aug`."""

import signal
import sys
from collections.abc import Mapping
from typing import Any

from maect.core.errors import UserError
from maect.recipes import recipe_names, recipe_values, sizes, variant_names, variant_values


def table_of(name: str) -> str:
    """A recipe or an evaluation as the paper prints it: a row a setting, a column a size.

    Raises:
        UserError: unknown name.
    """
    read = variant_values if name in variant_names() else recipe_values
    columns = [_flat(read(name, size)) for size in sizes()]
    rows = [[name, *sizes()], *([key, *(str(c[key]) for c in columns)] for key in columns[0])]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of nested mappings joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`, say
    try:
        print("\n\n".join(table_of(name) for name in sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
    if not sys.argv[1:]:
        print("recipes:", *recipe_names(), "\nevaluations:", *variant_names())
