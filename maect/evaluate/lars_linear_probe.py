"""Linear probe of the leaderboard billpsomas/efficient-probing: LARS, 90 epochs, one rate.

It reads the [CLS] token of the last block before the final norm, or the mean of the patch tokens of
an encoder that has none, as its k-NN does. Rate, schedule, images and what differs from the
authors' code are those of `efficient_probe`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from maect.evaluate.lars import LarsProbe, TrainsByLars
from maect.evaluate.trained import Trainee, Trial

if TYPE_CHECKING:
    import torch

    from maect.evaluate.encoding import Encoding


class LarsLinearProbe(TrainsByLars):
    """Linear probe trained with LARS, of the leaderboard for frozen encoders."""

    name: ClassVar[str] = "lars_linear_probe"
    title: ClassVar[str] = "linear probe by LARS"
    test_data: ClassVar[str | None] = (
        "lars_linear_probe is the best epoch on the test split, as the leaderboard reports it; "
        "lars_linear_probe_last is the last one"
    )

    def encoding(self, path: Path, device: torch.device) -> Encoding:
        """The [CLS] token, if there is one, without the final norm."""
        from maect.evaluate.base import encoder_settings
        from maect.evaluate.encoding import Encoding

        token = encoder_settings(path.parent).class_token
        pooling: Literal["cls", "mean"] = "cls" if token else "mean"
        return Encoding(path, device, self.precision, pooling=pooling, norm=False)

    def probe(self, trial: Trial) -> Trainee:
        """Accuracies in percent: `lars_linear_probe` (best epoch), its `_last`, and all.

        The probe of the best epoch is kept.
        """
        return LarsProbe(trial, self)
