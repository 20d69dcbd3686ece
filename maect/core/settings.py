"""Base of all that can be told: typed, immutable; an unknown key is a spelling mistake."""

import hashlib
import json
import os
import typing
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
)

from maect.core.errors import UserError
from maect.core.files import write_text
from maect.core.names import did_you_mean


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _absolute(path: Path, info: ValidationInfo) -> Path:
    return Path(os.path.abspath((info.context or {}).get("folder", Path()) / path))


def _relative(path: Path, info: SerializationInfo) -> str:
    folder = (info.context or {}).get("folder")
    return str(path) if folder is None else os.path.relpath(path, folder)


LocalPath = Annotated[Path, AfterValidator(_absolute), PlainSerializer(_relative)]
"""A path in the same results folder as the file that names it: absolute in memory, in the file
relative to it, so that the folder can be moved."""


class SettingsFile(Settings):
    """Settings that have a YAML file of their own."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read and check a file.

        Raises:
            UserError: no such file, not YAML, an unknown key or a wrong value.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
        try:
            folder = Path(path).absolute().parent
            return cls.model_validate(values, context={"folder": folder})
        except ValidationError as error:
            raise one_line(error, str(path)) from None

    def text(self, path: str | Path) -> str:
        """The content of the file at `path`, whether or not it is there."""
        values = self.model_dump(mode="json", context={"folder": Path(path).absolute().parent})
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)

    def write(self, path: str | Path) -> bool:
        """Write the file atomically; leave one of the same content alone, with its time.

        Returns:
            Whether it was written.
        """
        text = self.text(path)
        try:
            if Path(path).read_text(encoding="utf-8") == text:
                return False
        except (FileNotFoundError, UnicodeDecodeError):
            pass
        write_text(path, text)
        return True


def one_line(error: ValidationError, where: str) -> UserError:
    """The first fault of a validation as one message with its place and, if near, its cure."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        model: Any = error.title
        known = _known_keys(str(model), fault["loc"])
        hint = did_you_mean(str(fault["loc"][-1]), known, "known keys")
        return UserError(f"{where}: unknown key {key!r}; {hint}")
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
    """Short hexadecimal identity of settings or JSON values, whatever the order of their keys."""
    plain = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
