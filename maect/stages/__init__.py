"""The stages: what can be trained or imported, each a module of its own."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from maect.core.settings import one_line
from maect.recipes import Encoder, load_encoder, merge, recipe_values
from maect.stages.base import EVERY_OTHER, Stage, Training
from maect.stages.fine_tune import FineTune
from maect.stages.head import Head
from maect.stages.imported import Import
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune

__all__ = ["STAGES", "Stage", "Training", "load_import", "load_recipe", "starts_from"]

STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (Pretrain, Head, Tune, FineTune, Import)
}


def starts_from(name: str) -> tuple[str, ...]:
    """Names of the stages whose runs a stage may start from."""
    named = STAGES[name].starts_from
    return tuple(other for other in STAGES if other != name) if EVERY_OTHER in named else named


def load_recipe(name: str, size: str, overrides: Mapping[str, Any] | None = None) -> Training:
    """A recipe for an encoder size, with overrides; `head: {topk: 1}` changes one key of `head`.

    Raises:
        UserError: unknown recipe, size or key, or a value out of range.
    """
    values = merge(recipe_values(name, size), overrides or {})
    stage = values.pop("stage")
    try:
        return cast(Training, STAGES[stage].model_validate(values))
    except ValidationError as error:
        raise one_line(error, f"recipe {name}") from None


def load_import(
    layout: str | None, size: str, image_size: int | None = None
) -> tuple[Import, Encoder]:
    """An import in place of a recipe, and the encoder that it gives.

    Raises:
        UserError: unknown layout or size.
    """
    try:
        settings = Import.model_validate({"layout": layout})
    except ValidationError as error:
        raise one_line(error, "weights") from None
    change = {"class_token": settings.class_token}
    return settings, load_encoder(size, image_size).model_copy(update=change)
