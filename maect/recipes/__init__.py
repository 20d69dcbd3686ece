"""The paper's hyper-parameter tables as data, and the shapes that they speak of.

Imports nothing heavy: a dry run of the pipeline reads these to validate an experiment.
"""

from maect.recipes.settings import AUGMENTATIONS, Contrastive, Encoder, View, visible_patches
from maect.recipes.tables import column, load_encoder, read_table, recipe_names, sizes

__all__ = [
    "AUGMENTATIONS",
    "Contrastive",
    "Encoder",
    "View",
    "column",
    "load_encoder",
    "read_table",
    "recipe_names",
    "sizes",
    "visible_patches",
]
