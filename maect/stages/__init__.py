"""The stages: what can be trained or imported, each a module of its own."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from maect.core.settings import one_line
from maect.recipes import Encoder, load_encoder, merge, recipe_values
from maect.stages.base import Stage
from maect.stages.head import Head
from maect.stages.imported import Import
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune

__all__ = ["STAGES", "Head", "Import", "Pretrain", "Stage", "Tune", "load_import", "load_recipe"]

STAGES: dict[str, type[Stage]] = {"pretrain": Pretrain, "head": Head, "tune": Tune}


def load_recipe(name: str, size: str, overrides: Mapping[str, Any] | None = None) -> Stage:
    """A recipe for an encoder size, with overrides; `head: {topk: 1}` changes one key of `head`.

    Returns:
        `Pretrain`, `Head` or `Tune`, whichever the recipe is for.

    Raises:
        UserError: unknown recipe, size or key, or a value out of range.
    """
    values = merge(recipe_values(name, size), overrides or {})
    stage = values.pop("stage")
    try:
        return STAGES[stage].model_validate(values)
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
    change = {"class_token": settings.layout != "ijepa"}
    return settings, load_encoder(size, image_size).model_copy(update=change)
