"""A run's resolved file, `runs/RUN/config.yaml`: all that a training or an import is told."""

from pathlib import Path
from typing import Any, Self, cast

from pydantic import Field, SerializeAsAny

from maect.core.errors import UserError
from maect.core.names import check_names
from maect.core.settings import digest, validated
from maect.core.settings_file import LocalPath, SettingsFile
from maect.recipes import Encoder
from maect.stages import STAGES, Stage, Training


class RunConfig(SettingsFile):
    """One run. It lies in the run's folder, where the run leaves its files."""

    run: str
    stage: str
    recipe: str | None = None
    """Where `settings` come from; nothing reads it."""
    size: str
    """The encoder size, a column of the recipe."""
    seed: int = Field(default=0, ge=0)
    shards: LocalPath | None = None
    """Of the train split; none: an import."""
    source: LocalPath | None = None
    """Folder of the run that this one starts from."""
    weights: LocalPath | None = None
    """The published checkpoint that is imported; its path is no part of the run's identity."""
    encoder: Encoder
    settings: SerializeAsAny[Stage]

    @classmethod
    def parse(cls, values: dict[str, Any], where: str, context: dict[str, Any]) -> Self:
        """The run that nested values describe; `settings` are those of its stage."""
        stage = str(values.get("stage"))
        check_names(f"{where}: stage", [stage], STAGES)
        settings = validated(STAGES[stage], values.get("settings", {}), f"{where}: settings")
        config = super().parse(values | {"settings": settings}, where, context)
        try:
            settings.check_encoder(config.encoder)
        except ValueError as error:
            raise UserError(f"{where}: settings: {error}") from None
        return config

    def named(self, path: Path) -> Self:
        """The same run, to be at another path."""
        return self.model_copy(update={"run": path.absolute().parent.name})

    def training(self, where: str | Path) -> tuple[Training, Path]:
        """What to train, and the shards of the images.

        Args:
            where: this file, for the message.

        Raises:
            UserError: a stage that does not train.
        """
        if not self.settings.trains or self.shards is None:
            raise UserError(f"{where}: stage {self.stage} does not train; `maect import {where}`")
        return cast(Training, self.settings), self.shards

    @property
    def digest(self) -> str:
        """Identity of what the run is told; where its inputs are is not part of it."""
        return digest(self.stage, self.settings, self.encoder, self.seed)
