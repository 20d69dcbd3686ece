"""Base of all that can be told: typed, immutable; an unknown key is a spelling mistake."""

import hashlib
import json
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maect.core.errors import UserError
from maect.core.names import did_you_mean


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def validated(model: type[S], values: Any, where: str, context: dict[str, Any] | None = None) -> S:
    """Values as settings of a class.

    Raises:
        UserError: the first fault, with `where`, its key and a hint.
    """
    try:
        return model.model_validate(values, context=context)
    except ValidationError as error:
        raise one_line(error, where) from None


def later(default: Any, **limits: Any) -> Any:
    """A field that older runs did not have: at its default it is in no dump, file or digest."""
    return Field(default=default, exclude_if=lambda value: value == default, **limits)


def one_line(error: ValidationError, where: str) -> UserError:
    """The first fault of a validation as one message with its key and a hint."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        model: Any = error.title
        known = _known_keys(str(model), fault["loc"])
        last = str(fault["loc"][-1])
        return UserError(f"{where}: unknown key {key!r}; {did_you_mean(last, known, 'known keys')}")
    message = fault["msg"].removeprefix("Value error, ")
    given = f" (given: {fault['input']!r})" if key and fault["type"] != "missing" else ""
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{given}")


def _known_keys(title: str, location: tuple[int | str, ...]) -> list[str]:
    """Keys that a settings class, found by its name, knows at `location`."""
    pending: list[type[Settings]] = [Settings]
    while pending:
        model = pending.pop()
        if model.__name__ == title:
            for part in location[:-1]:
                field = model.model_fields.get(str(part))
                inner = _types(field.annotation) if field else []
                model = inner[0] if inner else model
            return list(model.model_fields)
        pending.extend(model.__subclasses__())
    return []


def _types(annotation: Any) -> list[type[Settings]]:
    """The settings classes in an annotation such as `Contrastive | None`."""
    kinds = typing.get_args(annotation) or (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]


def digest(*parts: Any) -> str:
    """Short hexadecimal identity of settings or JSON values, whatever the order of their keys.

    What is added to settings that were hashed before must be `later`, or no old run resumes.
    """
    plain = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
