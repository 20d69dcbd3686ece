"""The typed settings of every stage and protocol, and the paper's hyper-parameter tables.

Imports nothing heavy: a dry run of the pipeline reads these to validate an experiment.
"""

from maect.recipes.evaluations import evaluation_names, load_evaluation
from maect.recipes.protocols import PROTOCOLS, Protocol
from maect.recipes.settings import (
    AUGMENTATIONS,
    Encoder,
    Head,
    Import,
    Pretrain,
    Settings,
    Stage,
    Tune,
    View,
    digest,
    one_line,
)
from maect.recipes.tables import load_encoder, load_import, load_recipe, recipe_names, sizes

__all__ = [
    "AUGMENTATIONS",
    "PROTOCOLS",
    "Encoder",
    "Head",
    "Import",
    "Pretrain",
    "Protocol",
    "Settings",
    "Stage",
    "Tune",
    "View",
    "digest",
    "evaluation_names",
    "load_encoder",
    "load_evaluation",
    "load_import",
    "load_recipe",
    "one_line",
    "recipe_names",
    "sizes",
]
