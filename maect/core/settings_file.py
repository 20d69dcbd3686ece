"""Resolved files: everything that a job is told, typed, in YAML that a person can read and edit."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, PlainSerializer, SerializationInfo, ValidationInfo

from maect.core.errors import UserError
from maect.core.files import write_text
from maect.core.settings import Settings, digest, validated

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _to_absolute(path: Path, info: ValidationInfo) -> Path:
    return Path(os.path.abspath((info.context or {}).get("folder", Path()) / path.expanduser()))


def _from_file(path: Path, info: SerializationInfo) -> str:
    context = info.context or {}
    if "paths" in context:
        return ""
    folder = context.get("folder")
    inside = folder is not None and path.is_relative_to(folder.parent.parent)
    return os.path.relpath(path, folder) if inside else str(path)


LocalPath = Annotated[Path, AfterValidator(_to_absolute), PlainSerializer(_from_file)]
"""Absolute in memory; in a file relative to its folder, so that results can be moved as a whole.
What is outside of the folder's grandparent, the results folder, stays absolute."""


class SettingsFile(Settings):
    """Settings that have a YAML file of their own."""

    @classmethod
    def read(cls, path: str | Path, changes: Iterable[str] = ()) -> Self:
        """Read a file and check it.

        Args:
            path: the file.
            changes: `KEY=VALUE` with dots for nested keys, in place of what the file says.

        Raises:
            UserError: no such file, or its first fault, with file, key and hint.
        """
        path = Path(path)
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `maect resolve EXPERIMENT` writes it") from None
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}: not a mapping of keys to values")
        for change in changes:
            _change(values, change)
        return cls.parse(values, str(path), {"folder": Path(os.path.abspath(path)).parent})

    @classmethod
    def parse(cls, values: dict[str, Any], where: str, context: dict[str, Any]) -> Self:
        """The object that nested values describe."""
        return validated(cls, values, where, context)

    def named(self, path: Path) -> Self:
        """The same, to be at another path: a name that the path gives is that of the new one."""
        return self

    @property
    def digest(self) -> str:
        """Identity of what the file says; where inputs are is not part of it."""
        return digest(self.model_dump(mode="json", context={"paths": None}))

    def check_digest(self, submitted: str | None, path: str | Path) -> None:
        """Refuse a file that says something else than when its job was submitted.

        Raises:
            UserError: it does; what the job has saved belongs to what it was told then.
        """
        if submitted not in (None, self.digest):
            raise UserError(f"{path}: changed since this job was submitted; start again")

    def text(self, path: str | Path) -> str:
        """The content of the file at `path`."""
        folder = Path(os.path.abspath(path)).parent
        context = {"folder": folder}
        values = self.model_dump(mode="json", context=context)
        values = {key: value for key, value in values.items() if value is not None}
        return yaml.dump(values, Dumper=DUMPER, sort_keys=False, width=100)

    def write(self, path: str | Path) -> bool:
        """Write the file, atomically, if it does not say the same already; returns whether."""
        path, text = Path(path), self.text(path)
        try:
            if path.read_text(encoding="utf-8") == text:
                return False
        except (OSError, UnicodeDecodeError):
            pass
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
    try:
        values[last] = yaml.load(text, LOADER)
    except yaml.YAMLError:
        raise UserError(f"{change}: {text!r} is not valid YAML") from None
