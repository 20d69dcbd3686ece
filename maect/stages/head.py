"""Initialisation of the NNCLR head."""

from typing import TYPE_CHECKING, ClassVar

from maect.recipes import Contrastive, Encoder
from maect.stages.base import SelfSupervised

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import ContrastiveObjective


class Head(SelfSupervised):
    """Initialisation of the NNCLR head on the frozen encoder."""

    name: ClassVar[str] = "head"
    title: ClassVar[str] = "Initialising the NNCLR head {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune")
    trains_encoder: ClassVar[bool] = False

    head: Contrastive

    def objective(self, encoder: Encoder, seed: int) -> "ContrastiveObjective":
        """Return encoder and head, with random weights."""
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import ContrastiveObjective

        with seeded(seed):
            vit, head = build_encoder(encoder), NNCLRHead(encoder.width, self.head)
        if self.trains_encoder:
            vit.freeze(encoder.depth - self.trained_blocks(encoder))
        return ContrastiveObjective(self, vit, head, seed)
