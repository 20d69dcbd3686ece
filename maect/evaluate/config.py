"""An evaluation's resolved file, `evaluations/RUN/NAME.yaml`: all that a protocol is told."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SerializeAsAny

from maect.core.errors import check_names
from maect.core.settings import LocalPath, SettingsFile, digest, validated
from maect.evaluate.base import Protocol
from maect.evaluate.registry import PROTOCOLS


class EvaluationConfig(SettingsFile):
    """One evaluation. `NAME.json` and what else the protocol leaves go beside the file."""

    evaluation: str
    protocol: str
    run: LocalPath
    """Folder of the run that is evaluated."""
    resize: int | None = Field(default=None, gt=0)
    """Shorter side before the centre crop of test images; none: 256/224 of their size."""
    inputs: dict[str, LocalPath | list[LocalPath]] = Field(default_factory=dict)
    """By the names that the protocol declares: files of features or of what another evaluation
    left, folders of shards, or folders of runs."""
    settings: SerializeAsAny[Protocol]

    @classmethod
    def parse(cls, values: dict[str, Any], where: str, context: dict[str, Any]) -> Self:
        """The evaluation that nested values describe; `settings` are those of its protocol."""
        protocol = str(values.get("protocol"))
        check_names(f"{where}: protocol", [protocol], PROTOCOLS)
        settings = validated(PROTOCOLS[protocol], values.get("settings", {}), f"{where}: settings")
        return super().parse(values | {"settings": settings}, where, context)

    def named(self, path: Path) -> Self:
        """The same evaluation, to be at another path."""
        return self.model_copy(update={"evaluation": path.stem})

    @property
    def digest(self) -> str:
        """Identity of what the protocol is told; where its inputs are is not part of it."""
        return digest(self.protocol, self.settings, self.resize)

    def paths(self, name: str) -> list[Path]:
        """An input as a list, whether it is one path or many."""
        value = self.inputs[name]
        return value if isinstance(value, list) else [value]
