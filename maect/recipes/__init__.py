"""Recipes and encoder sizes as data: the paper's hyper-parameter tables.

Nothing heavy is imported, since a dry run of the pipeline reads them to check an experiment.

`base` names the entry that an entry starts from. Its own values replace those of the base, `head`
key by key. A mapping whose keys are encoder sizes has a value for each of them; other sizes have
that of the size that they are `like` (`encoders.yaml`).
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from maect.core.errors import UserError, did_you_mean
from maect.core.settings import Settings, validated
from maect.core.yaml_files import read_mapping, read_yaml
from maect.recipes.settings import (
    IMAGENET,
    KNN_K,
    KNN_TEMPERATURE,
    MOST_CHANNELS,
    WHITE,
    Contrastive,
    CropScale,
    Encoder,
    HeadSettings,
    InWeights,
    OnlineEvaluation,
    Pixels,
    Refiner,
    View,
    views_by_size,
    visible_patches,
)

FOLDER = Path(__file__).parent
OTHERS = ("encoders", "evaluations", "flops", "views")
"""YAML files of this folder that are no recipes."""


class _Views(Settings):
    """Content of `views.yaml`."""

    pairs: dict[str, tuple[View, View]]
    local: dict[str, View]


_VIEWS = _Views.model_validate(read_yaml(FOLDER / "views.yaml"))
AUGMENTATIONS, LOCAL = _VIEWS.pairs, _VIEWS.local


@cache
def _read(name: str) -> dict[str, Any]:
    return read_yaml(FOLDER / f"{name}.yaml")


@cache
def _written() -> dict[str, dict[str, Any]]:
    """Return the package's recipes and bases as written, by name."""
    names = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    return {name: _read(name) for name in names if name not in OTHERS}


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    """Return the package's recipes with inherited values; without a stage it is only a base."""
    recipes = {name: _inherit(_written(), name) for name in _written()}
    return {name: recipe for name, recipe in recipes.items() if "stage" in recipe}


def is_own(recipe: str) -> bool:
    """Return whether a recipe is the path of a file, and not a name."""
    return recipe.endswith((".yaml", ".yml"))


def _own(path: Path, *heirs: Path) -> dict[str, Any]:
    """Read a user's recipe with inherited values: of the package, or of a file in its folder.

    Args:
        path: of the recipe.
        heirs: the recipes that start from it.

    Raises:
        UserError: no such file, no recipe, an unknown base or a circle of bases.
    """
    if path in heirs:
        raise UserError(f"{path}: a recipe that is its own base")
    own = read_mapping(path, "recipe")
    base = own.pop("base", None)
    if base is None:
        return own
    if is_own(str(base)):
        return merge(_own(path.parent / str(base), *heirs, path), own)
    try:
        return merge(_inherit(_written(), str(base)), own)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@cache
def _variants() -> dict[str, dict[str, Any]]:
    """Return the entries of `evaluations.yaml` with inherited values, by name."""
    own = _read("evaluations")
    return {name: _inherit(own, name) for name in own}


def recipe_names() -> tuple[str, ...]:
    """Return the names of the package's recipes."""
    return tuple(_recipes())


def variant_names() -> tuple[str, ...]:
    """Return the names of the evaluations in `evaluations.yaml`."""
    return tuple(_variants())


def sizes() -> tuple[str, ...]:
    """Return the names of the encoder sizes, smallest first."""
    return tuple(_read("encoders"))


def recipe_values(name: str, size: str) -> dict[str, Any]:
    """Return all values of a recipe, by name or path, for an encoder size, with its stage.

    Raises:
        UserError: unknown recipe or size, or a file that is no recipe.
    """
    if is_own(name):
        recipe = _own(Path(name))
    elif name in _recipes():
        recipe = _recipes()[name]
    else:
        raise UserError(f"unknown recipe {name!r}; {did_you_mean(name, recipe_names())}")
    if "stage" not in recipe:
        raise UserError(f"{name}: write `base`, the recipe that it starts from, or `stage`")
    return _at_size(recipe, size, f"recipe {name}")


def variant_values(name: str, size: str) -> dict[str, Any]:
    """Return the values in `evaluations.yaml` for an evaluation and a size; {} without an entry."""
    return _at_size(_variants().get(name, {}), size, f"evaluation {name}")


def load_encoder(size: str, image_size: int | None = None, pixels: Pixels | None = None) -> Encoder:
    """Return the encoder of a size, for its own or another image size and kind of pixels.

    Raises:
        UserError: unknown size, or an image size that the patches do not tile.
    """
    values: dict[str, Any] = {}
    for name in reversed(like(size)):
        values |= _read("encoders")[name]
    values.pop("like", None)
    if image_size is not None:
        values["image_size"] = image_size
    if pixels is not None:
        values["pixels"] = pixels
    return validated(Encoder, values, f"encoder {size}")


def like(size: str) -> tuple[str, ...]:
    """Return a size, the one that it is `like`, the one that this is `like`, and so on."""
    if size not in sizes():
        raise UserError(f"unknown encoder size {size!r}; {did_you_mean(size, sizes())}")
    other = _read("encoders")[size].get("like")
    return (size,) if other is None else (size, *like(other))


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with changes; a mapping such as `head: {topk: 1}` changes single keys."""
    merged = dict(values)
    for key, value in changes.items():
        old: Any = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(old, Mapping) and not _by_size(value)
        merged[key] = {**old, **value} if nested else value
    return merged


def _inherit(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return an entry with the values of its bases; UserError for an unknown base."""
    if name not in entries:
        raise UserError(f"recipes: unknown base {name!r}; {did_you_mean(name, entries)}")
    own = dict(entries[name])
    base = own.pop("base", None)
    return own if base is None else merge(_inherit(entries, base), own)


def _by_size(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and value.keys() <= set(sizes())


def _at_size(values: Mapping[str, Any], size: str, where: str) -> dict[str, Any]:
    """Return one size's values; UserError if it is unknown, or a value has none for it."""
    if size not in sizes():
        raise UserError(f"{where}: unknown encoder size {size!r}; {did_you_mean(size, sizes())}")

    def pick(key: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if not _by_size(value):
            return {inner: pick(f"{key}.{inner}", v) for inner, v in value.items()}
        for name in like(size):
            if name in value:
                return value[name]
        raise UserError(f"{where}: {key} has no value for {size} or a size that it is like")

    return {key: pick(key, value) for key, value in values.items()}
