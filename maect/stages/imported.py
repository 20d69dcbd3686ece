"""Encoders that others have trained."""

from typing import ClassVar, Literal

from maect.stages.base import Stage


class Import(Stage):
    """Instead of training: an encoder that others have trained (`docs/weights.md`)."""

    name: ClassVar[str] = "import"
    title: ClassVar[str] = "Importing {run}"
    trains: ClassVar[bool] = False

    layout: (
        Literal["mae", "mae_ct", "layer_grafting", "moco_v3", "msn", "ijepa", "ibot", "dino"] | None
    ) = None
    """How the checkpoint is laid out; none: found from its content."""
