"""Initialisation of the NNCLR head."""

from typing import ClassVar

from pydantic import model_validator

from maect.recipes import Contrastive, Encoder, visible_patches
from maect.recipes.flops import head_flops, head_parameters, parameters, view_flops
from maect.stages.base import SelfSupervised


class Head(SelfSupervised):
    """Initialisation of the NNCLR head on the frozen encoder."""

    name: ClassVar[str] = "head"
    title: ClassVar[str] = "Initialising the NNCLR head {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune")

    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Head":
        return self.check_contrastive()

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        view = view_flops(encoder, tokens, frozen=encoder.depth)
        return self.views * (view + head_flops(self.head, encoder.width, self.batch_size, False))

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a run leaves: its states and the files that it exports."""
        learnt = head_parameters(self.head, encoder.width)
        return self._state(learnt, 0, parameters(encoder) + learnt)
