"""Settings, typed and immutable, in which an unknown key is a spelling mistake; and their files."""

import hashlib
import json
import os
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

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

from maect.core.errors import OtherFormatError, UserError, check_names, did_you_mean
from maect.core.files import FORMAT, check_format, read_text, write_text
from maect.core.yaml_files import DUMPER, parse_yaml, read_yaml_text, shortened


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def matches_record(self, values: Any) -> bool:
        """Return whether a record has these settings; a missing one counts as its default."""
        try:
            return type(self).model_validate(values).identifying() == self.identifying()
        except ValidationError:
            return False

    def identifying(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON values; inputs' places not.

        Of a path it counts only that there is one.
        """
        return self.model_dump(mode="json", exclude_defaults=True, context={"paths": None})


S = TypeVar("S", bound=Settings)


def validated(model: type[S], values: Any, where: str, context: dict[str, Any] | None = None) -> S:
    """Return values as settings of a class; UserError for the first fault, with key and hint."""
    try:
        return model.model_validate(values, context=context)
    except ValidationError as error:
        raise one_line(error, model, where) from None


def one_line(error: ValidationError, model: type[Settings], where: str) -> UserError:
    """Return the first fault of values for a class as one message with its key and a hint."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _known_keys(model, fault["loc"])
        last = str(fault["loc"][-1])
        return UserError(f"{where}: unknown key {key!r}; {did_you_mean(last, known, 'known keys')}")
    message = fault["msg"].removeprefix("Value error, ")
    whole = isinstance(fault["input"], dict) and fault["type"] == "value_error"
    shown = key and fault["type"] != "missing" and not whole
    given = f" (given: {shortened(fault['input'])})" if shown else ""
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{given}")


def _known_keys(model: type[Settings], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a settings class knows at `location`."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        inner = _types(field.annotation) if field else []
        model = inner[0] if inner else model
    return list(model.model_fields)


def _types(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes in an annotation such as `Contrastive | None`."""
    kinds = typing.get_args(annotation) or (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]


def digest(*parts: Any) -> str:
    """Return a short hexadecimal identity of settings or JSON values, in any order of keys.

    Of settings it is what differs from their defaults, so that a new one changes no identity. A
    default is therefore a part of the format, and never changes within one.
    """
    plain = [p.identifying() if isinstance(p, Settings) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_absolute(path: Path, info: ValidationInfo) -> Path:
    return Path(os.path.abspath((info.context or {}).get("folder", Path()) / path.expanduser()))


def _from_file(path: Path, info: SerializationInfo) -> str:
    context = info.context or {}
    if "root" in context and path.is_relative_to(context["root"]):
        return os.path.relpath(path, context["folder"])
    return "" if "paths" in context else str(path)


LocalPath = Annotated[Path, AfterValidator(_to_absolute), PlainSerializer(_from_file)]
"""Absolute in memory; in a file relative to its folder, so that results can be moved as a whole.
What is outside of the results folder stays absolute."""


def _unless_identifying(path: str, info: SerializationInfo) -> str:
    return "" if "paths" in (info.context or {}) else path


ContentPath = Annotated[str, PlainSerializer(_unless_identifying)]
"""Path of a file or folder, as given, that settings or records identify by a checksum: the same
content elsewhere is the same input."""


STAMP = "# Checked when written: {}. After an edit it is checked again.\n"


class SettingsFile(Settings):
    """Settings that have a YAML file of their own.

    What is in memory was checked when it was made. Its file says so with a digest of what follows,
    so that only a file that was edited is checked again.
    """

    kinds: ClassVar[tuple[str, Mapping[str, type[Settings]]] | None] = None
    """The key that names the class of `settings`, and the classes; none: there is one class."""
    depth: ClassVar[int] = 2
    """Depth of a file in the results folder, in folders."""

    @classmethod
    def read(
        cls, path: str | Path, changes: Iterable[str] = (), submitted: str | None = None
    ) -> Self:
        """Read a file; one that is not as it was written is checked.

        Args:
            changes: `KEY=VALUE` with dots for nested keys, in place of what the file says.
            submitted: digest of the file when the job was submitted that reads it now.

        Raises:
            UserError: no such file, or its first fault, with file, key and hint; or it has changed
                since the job was submitted: what the job saved belongs to the file of then.
        """
        path = Path(path)
        try:
            text = read_yaml_text(path)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `maect resolve EXPERIMENT` writes it") from None
        values = parse_yaml(text, str(path))
        if not isinstance(values, dict):
            raise UserError(f"{path}: not a mapping of keys to values")
        changes = tuple(changes)
        for change in changes:
            _change(values, change)
        try:
            values = check_format(values)
        except OtherFormatError as error:
            raise UserError(f"{path}: {error}") from None
        settings = cls.parse(values, str(path), {"folder": Path(os.path.abspath(path)).parent})
        if submitted not in (None, settings.digest):
            raise UserError(f"{path}: changed since this job was submitted; start again")
        stamp, end, rest = text.partition("\n")
        as_written = stamp + end == STAMP.format(digest(rest))
        if submitted is None and (changes or not as_written):
            settings.check(str(path))
        return settings

    @classmethod
    def parse(cls, values: dict[str, Any], where: str, context: dict[str, Any]) -> Self:
        """Return the object that nested values describe."""
        if cls.kinds is not None:
            key, classes = cls.kinds
            kind = str(values.get(key))
            check_names(f"{where}: {key}", [kind], classes)
            settings = validated(classes[kind], values.get("settings", {}), f"{where}: settings")
            values = values | {"settings": settings}
        return validated(cls, values, where, context)

    def check(self, where: str) -> None:
        """Refuse settings that contradict each other or the files they name (UserError)."""

    def named(self, path: Path) -> Self:
        """Return this config for another path; a name that follows from the path changes."""
        return self

    @property
    def digest(self) -> str:
        """Identity of the file's content, without the places of inputs."""
        return digest(self.identifying())

    def _context(self, path: str | Path) -> dict[str, Path]:
        """Return the folder of a file at `path`, and its results folder."""
        folder = Path(os.path.abspath(path)).parent
        return {"folder": folder, "root": [folder, *folder.parents][self.depth]}

    def text(self, path: str | Path) -> str:
        """Return the content of the file at `path`."""
        values = self.model_dump(mode="json", context=self._context(path))
        values = {key: value for key, value in values.items() if value is not None}
        text = yaml.dump({"format": FORMAT} | values, Dumper=DUMPER, sort_keys=False, width=100)
        return STAMP.format(digest(text)) + text

    def write(self, path: str | Path) -> bool:
        """Write the file, atomically, if it does not say the same already; returns whether."""
        path, text = Path(path), self.text(path)
        with suppress(OSError, UnicodeDecodeError):
            if read_text(path) == text:
                return False
        write_text(path, text)
        return True


def _change(values: dict[str, Any], change: str) -> None:
    """Set one nested value, `settings.head.topk=1`."""
    key, separator, text = change.partition("=")
    if not separator or not key:
        raise UserError(f"{change}: write KEY=VALUE")
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UserError(f"{change}: {parent!r} has no keys of its own")
        values = inner
    values[last] = parse_yaml(text, change)
