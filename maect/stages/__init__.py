"""Registry of the stages, each a module of its own."""

from collections.abc import Mapping
from typing import Any, cast

from maect.core.errors import UserError, check_names
from maect.core.settings import validated
from maect.recipes import Encoder, merge, recipe_values
from maect.recipes.settings import Computing, separate
from maect.records import RunRecord
from maect.stages.diet import Diet
from maect.stages.fine_tune import FineTune
from maect.stages.imported import Import
from maect.stages.pretrain import Pretrain
from maect.stages.refine import Refine, RefineHeads
from maect.stages.tune import Head, Tune
from maect.train.stage import EVERY_OTHER, Stage, Training

STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (
        Pretrain,
        Head,
        Tune,
        RefineHeads,
        Refine,
        Diet,
        FineTune,
        Import,
    )
}


def starts_from(name: str) -> tuple[str, ...]:
    """Return the names of the stages whose runs a stage may start from."""
    named = STAGES[name].starts_from
    if EVERY_OTHER in named:
        return tuple(other for other in STAGES if other != name)
    return named


def recorded(record: RunRecord) -> Stage:
    """Return the stage of a finished run with its settings; UserError if it is unknown."""
    where = f"run {record.run}"
    check_names(f"{where}: stage", [record.stage], STAGES)
    return validated(STAGES[record.stage], record.settings, f"{where}: settings")


def check_source(
    where: str,
    settings: Stage,
    encoder: Encoder,
    source: tuple[str, Stage, Encoder] | None,
    key: str,
) -> None:
    """Check the run that a stage is to start from.

    Args:
        where: the run that is checked, for messages.
        settings: its stage.
        encoder: its encoder.
        source: name, stage and encoder of the run to start from; None: there is none.
        key: of the experiment or config that names the run to start from.

    Raises:
        UserError: a run is needed and missing, not needed and given, or of another stage, encoder
            or head.
    """
    allowed = starts_from(settings.name) if settings.needs_source else ()
    if source is None:
        if allowed:
            raise UserError(f"{where}: stage {settings.name} needs `{key}`: a run to start from")
        return
    name, stage, its_encoder = source
    if stage.name not in allowed:
        raise UserError(
            f"{where}: stage {settings.name} starts from {' or '.join(allowed) or 'nothing'}, "
            f"but {name} is a {stage.name} run"
        )
    try:
        settings.check_source(encoder, stage, its_encoder)
    except ValueError as error:
        raise UserError(f"{where}: {error} of {name}") from None


def load_recipe(name: str, size: str, overrides: Mapping[str, Any] | None = None) -> Training:
    """Return a recipe's settings for an encoder size.

    Args:
        name: of the recipe, or its file.
        size: of the encoder.
        overrides: settings that replace the recipe's; `head: {topk: 1}` changes one key of `head`.

    Raises:
        UserError: unknown recipe, stage, size or key, or a value out of range.
    """
    values, _ = separate(merge(recipe_values(name, size), overrides or {}))
    trained = [name for name, stage in STAGES.items() if stage.trains]
    stage = str(values.pop("stage"))
    check_names(f"recipe {name}: stage", [stage], trained)
    return cast(Training, validated(STAGES[stage], values, f"recipe {name}"))


def load_computing(
    name: str, size: str, overrides: Mapping[str, Any], computing: Mapping[str, Any]
) -> Computing:
    """Return how a recipe is computed, with overrides."""
    _, values = separate(recipe_values(name, size) | dict(overrides))
    return validated(Computing, values | dict(computing), "computing")
