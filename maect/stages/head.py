"""Initialisation of the NNCLR head."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from maect.core.files import atomic_write
from maect.recipes import Contrastive, Encoder, visible_patches
from maect.recipes.flops import head_flops, head_parameters, parameters, view_flops
from maect.recipes.memory import (
    Footprint,
    encoder_activations,
    footprint,
    head_activations,
    head_buffers,
    head_weights,
)
from maect.stages.base import SelfSupervised

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.stages.objectives import ContrastiveObjective
    from maect.train.checkpoint import StateReader


class Head(SelfSupervised):
    """Initialisation of the NNCLR head on the frozen encoder."""

    name: ClassVar[str] = "head"
    title: ClassVar[str] = "Initialising the NNCLR head {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune")
    trains_encoder: ClassVar[bool] = False

    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Head":
        return self.check_contrastive()

    def objective(self, encoder: Encoder, seed: int) -> "ContrastiveObjective":
        """Frozen encoder and head, with random weights."""
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import ContrastiveObjective

        with seeded(seed):
            vit, head = build_encoder(encoder), NNCLRHead(encoder.width, self.head)
        return ContrastiveObjective(self, vit, head, seed, train_encoder=False)

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Nothing but the head learns."""
        return 0.0, 0.0

    def export(
        self,
        folder: Path,
        encoder: Encoder,
        reader: "StateReader",
        source: Path | None,
        index: "Index",
    ) -> dict[str, Any]:
        """Write the head, and the source's encoder as it is, to the byte."""
        from maect.models.weights import load_encoder_weights
        from maect.stages.weights import export_head

        target = folder / "encoder.safetensors"
        with atomic_write(target) as temporary:
            shutil.copyfile(self.need(source) / "encoder.safetensors", temporary)
        export_head(folder, self.head, encoder, reader)
        return {"pooling": load_encoder_weights(target)[2]}

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        view = view_flops(encoder, tokens, frozen=encoder.depth)
        return self.views * (view + head_flops(self.head, encoder.width, self.batch_size, False))

    def footprint(self, encoder: Encoder, images: int) -> Footprint:
        """Device memory of a pass over this many images on one rank."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        trained = head_weights(self.head, encoder.width)
        parts = [
            encoder_activations(self, encoder, tokens, 0),
            head_activations(self, self.head, encoder.width),
        ]
        return footprint(
            self, encoder, self.views * images, parts,
            weights=parameters(encoder) + trained, trained=trained,
            buffers=head_buffers(self.head, encoder.width),
        )  # fmt: skip

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a finished run leaves."""
        learnt = head_parameters(self.head, encoder.width)
        return self._state(learnt, 0, parameters(encoder) + learnt)
