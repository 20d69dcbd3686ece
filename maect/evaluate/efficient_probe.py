"""Efficient probing: attention over the patch tokens with learnt queries (Psomas et al. 2026).

Q queries attend to the frozen patch tokens, which are their own keys; query q sums up its own
D / Q of the D value channels. A BatchNorm without parameters and a linear classifier follow.
docs/reference/authors_code.md compares each setting with the authors' code
(billpsomas/efficient-probing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from maect.core.errors import UserError
from maect.evaluate.lars import LarsProbe, TrainsByLars
from maect.evaluate.trained import Trainee, Trial

if TYPE_CHECKING:
    from torch import Tensor


class EfficientProbe(TrainsByLars):
    """Attentive probe on the patch tokens: multi-query cross-attention, trained with LARS."""

    name: ClassVar[str] = "efficient_probe"
    title: ClassVar[str] = "efficient probe"
    test_data: ClassVar[str | None] = (
        "efficient_probe is the best epoch on the test split, as the authors report it; "
        "efficient_probe_last is the last one"
    )

    queries: int = Field(default=32, gt=0)

    def probe(self, trial: Trial) -> Trainee:
        """Accuracies in percent: `efficient_probe` (best epoch), `efficient_probe_last`, and all.

        The probe of the best epoch is kept.
        """
        width = trial.encoding.settings.width
        if width % self.queries:
            raise UserError(
                f"{trial.job.out.stem}: queries {self.queries} do not divide the encoder's width "
                f"{width}"
            )
        return Probe(trial, self, "queries", "values")


class Probe(LarsProbe):
    """Attentive pooling in front of BatchNorm and classifier.

    Attributes:
        queries: [Q, D]; values: [D, D], rows q D / Q to (q + 1) D / Q are query q's.
    """

    queries: Tensor
    values: Tensor

    def initialize(self, width: int, classes: int, settings: EfficientProbe) -> None:
        """Set the initial values, in the authors' order."""
        import torch
        from torch import nn

        self.values = nn.Linear(width, width, bias=False).weight
        super().initialize(width, classes, settings)
        self.queries = 0.02 * torch.randn(settings.queries, width)

    def read(self, images: Tensor) -> Tensor:
        """Return the patch tokens, float32 [b, N, D]."""
        return self.trial.encoding.output(images).patch_tokens().float()

    def pool(self, tokens: Tensor) -> Tensor:
        """Return what the queries see of tokens [b, N, D]: [b, D]."""
        count, width = self.queries.shape
        attention = (tokens @ (self.queries.T * width**-0.5)).softmax(dim=1)  # [b, N, Q]
        seen = attention.transpose(1, 2) @ tokens  # [b, Q, D]
        # For each query a product of its own: [Q, b, D] with [Q, D, D / Q].
        values = self.values.view(count, -1, width).transpose(1, 2)
        return (seen.transpose(0, 1) @ values).transpose(0, 1).flatten(1)
