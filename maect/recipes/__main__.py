"""Prints recipes and evaluations as the paper does: `python -m maect.recipes ct_min ct_aug`."""

import sys

from maect.core.errors import UserError
from maect.recipes.tables import recipe_names, table_of, variant_names

if __name__ == "__main__":
    try:
        print("\n\n".join(table_of(name) for name in sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
    if not sys.argv[1:]:
        print("recipes:", *recipe_names(), "\nevaluations:", *variant_names())
