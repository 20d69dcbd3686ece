"""The paper's hyper-parameter tables as data, and the shapes that they speak of.

Imports nothing heavy: a dry run of the pipeline reads these to validate an experiment.
"""

from maect.recipes.settings import AUGMENTATIONS, Contrastive, Encoder, View, visible_patches
from maect.recipes.tables import (
    like,
    load_encoder,
    merge,
    recipe_names,
    recipe_values,
    sizes,
    variant_names,
    variant_values,
)

__all__ = [
    "AUGMENTATIONS",
    "Contrastive",
    "Encoder",
    "View",
    "like",
    "load_encoder",
    "merge",
    "recipe_names",
    "recipe_values",
    "sizes",
    "variant_names",
    "variant_values",
    "visible_patches",
]
