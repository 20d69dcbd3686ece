"""Encoders that others have trained."""

from typing import Literal

from maect.core.settings import Settings


class Import(Settings):
    """Instead of training: an encoder that others have trained (`docs/weights.md`)."""

    layout: (
        Literal["mae", "mae_ct", "layer_grafting", "moco_v3", "msn", "ijepa", "ibot", "dino"] | None
    ) = None
    """How the checkpoint is laid out; none: found from its content."""
