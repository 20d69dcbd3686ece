"""Print recipes and evaluations as the paper does: `python -m maect.recipes ct_min ct_aug`.

Names of encoder sizes select columns: `python -m maect.recipes refine large`.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maect.core.errors import UserError
from maect.core.log import aligned
from maect.recipes import recipe_names, recipe_values, sizes, variant_names, variant_values


def table_of(name: str, shown: Sequence[str] = ()) -> str:
    """Return a recipe or an evaluation as a table: a row a setting, a column a size."""
    read = variant_values if name in variant_names() else recipe_values
    shown = shown or sizes()
    columns = [_flat(read(name, size)) for size in shown]
    rows = [[name, *shown], *([key, *(str(c[key]) for c in columns)] for key in columns[0])]
    return "\n".join(aligned(rows, range(1, len(rows[0]))))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the keys of nested mappings joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if nested else {key: value}
    return flat


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`, say
    sizes_asked = [word for word in sys.argv[1:] if word in sizes()]
    names = [word for word in sys.argv[1:] if word not in sizes()]
    if not names or names[0] in ("-h", "--help"):
        print(__doc__, "\nrecipes:", *recipe_names())
        print("evaluations:", *variant_names(), "\nsizes:", *sizes())
        sys.exit()
    try:
        print("\n\n".join(table_of(name, sizes_asked) for name in names))
    except UserError as error:
        sys.exit(f"error: {error}")
