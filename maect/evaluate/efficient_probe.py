"""Efficient probing: attention over the patch tokens with learnt queries (Psomas et al. 2026).

Q queries attend to the frozen patch tokens, which are their own keys; query q sums up its own
D / Q of the D value channels. A BatchNorm without parameters and a linear classifier follow. The
yardstick of masked autoencoders since ICLR 2026, whose information is in the patches: of MAE's
ViT-L/16 (224) the authors report 79.5 by efficient probing, beside 48.1 by k-NN before the final
norm at the best of seven k, and the 76.0 by linear probing of MAE's own repository.

Compared with the authors' code (billpsomas/efficient-probing, the command of that 79.5):

| | there | here |
| --- | --- | --- |
| tokens | patches of the last block without the final norm, no [CLS] | the same |
| queries | 32, N(0, 0.02) | the same; a number that divides the encoder's width |
| projections | none for keys, values D x D without bias, scale D^-0.5, one head | the same |
| values | all tokens are projected, then summed | summed, then projected: equal, D / Q times less |
| classifier | BatchNorm(affine=False, eps 1e-6), Linear with torch's initialisation | the same |
| batch statistics | of each GPU's images, 256 in the log of that 79.5 | of the global batch, on \
any number of ranks |
| optimizer | LARS, momentum 0.9, trust 0.001, no weight decay, biases unscaled | the same |
| rate | 0.1 x 4096 / 256, 10 epochs of warm-up, cosine to 0 over 90, every step | the same, but \
neither 0 nor the peak comes up in the warm-up |
| images | crop of 8 to 100 %, bicubic, flip; 256 / 224 and centre crop to test | the same, but \
a crop that does not fit is drawn again, there it is clipped |
| precision | bfloat16 autocast in training, float16 in testing | encoder in bfloat16, probe in \
float32 |
| number | best epoch on the test split | `efficient_probe`; `efficient_probe_last` is the last's |

Not stated there: the seed of the rows that others ran, and whether Q was chosen for each encoder
(rows from the paper: the best of several; those measured later: 32). Its ten encoders that were
trained on their [CLS] token also attend to that one (`ep_all`), which is not built here.
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

        Raises:
            UserError: queries that do not divide the width.
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
        return self.trial.encoding.tokens(images).float()

    def pool(self, tokens: Tensor) -> Tensor:
        """Return what the queries see of tokens [b, N, D]: [b, D]."""
        count, width = self.queries.shape
        attention = (tokens @ (self.queries.T * width**-0.5)).softmax(dim=1)  # [b, N, Q]
        seen = attention.transpose(1, 2) @ tokens  # [b, Q, D]
        # For each query a product of its own: [Q, b, D] with [Q, D, D / Q].
        values = self.values.view(count, -1, width).transpose(1, 2)
        return (seen.transpose(0, 1) @ values).transpose(0, 1).flatten(1)
