"""What identifies bundled recipes, evaluations and runs, so that no number changes unnoticed.

After an intended change, write the file anew: `MAECT_WRITE_GOLDEN=1 pytest` with this file.
"""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.settings import Settings, digest
from maect.evaluate import evaluation_names, load_evaluation
from maect.experiment import load, resolve
from maect.recipes import load_encoder, recipe_names, sizes
from maect.stages import Training, load_recipe

GOLDEN = Path(__file__).with_name("golden_identities.json")
EXPERIMENTS = ("cifar10", "digits", "paper", "refined", "refined_ablations")


def of_each_size(make: Callable[[str], Settings]) -> str:
    """One digest of what sizes have; some have no value for a recipe."""
    found = {}
    for size in sizes():
        try:
            # Defaults, too, which a digest of settings leaves out.
            found[size] = digest(make(size).model_dump(mode="json"))
        except UserError:
            found[size] = "none"
    return digest(found)[:12]


def of_runs(experiment: str) -> str:
    """One digest of all runs that train, with their encoders, seeds and settings."""
    found = load(experiment)
    return digest({name: resolve.run_config(found, name).digest for name in found.runs})[:12]


@pytest.mark.parametrize("kind", ["encoders", "recipes", "evaluations", "experiments"])
def test_nothing_changed(kind):
    made: dict[str, Callable[[], dict[str, str]]] = {
        "encoders": lambda: {size: digest(load_encoder(size))[:12] for size in sizes()},
        "recipes": lambda: {
            name: of_each_size(lambda size, name=name: load_recipe(name, size))
            for name in recipe_names()
        },
        "evaluations": lambda: {
            name: of_each_size(lambda size, name=name: load_evaluation(name, size)[1])
            for name in evaluation_names()
        },
        "experiments": lambda: {name: of_runs(name) for name in EXPERIMENTS},
    }
    found, golden = made[kind](), json.loads(GOLDEN.read_text())
    if os.environ.get("MAECT_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {kind: found}, indent=1) + "\n")
        pytest.skip("written anew")
    assert {name: found[name] for name in golden[kind]} == golden[kind]


def test_every_recipe_fits_the_encoders_of_its_sizes():
    """Such as views of a multiple of the patches."""
    for name, size in itertools.product(recipe_names(), sizes()):
        try:
            stage = load_recipe(name, size)
        except UserError:  # without a value for this size
            continue
        if isinstance(stage, Training):
            stage.check_encoder(load_encoder(size))
