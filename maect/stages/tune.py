"""Contrastive tuning."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from maect.recipes import Contrastive, Encoder, visible_patches
from maect.recipes.flops import head_flops, head_parameters, parameters, view_flops
from maect.recipes.memory import (
    Footprint,
    encoder_activations,
    footprint,
    head_activations,
    head_buffers,
    head_weights,
    trained_parameters,
)
from maect.stages.base import SelfSupervised
from maect.train.stage import Stage

if TYPE_CHECKING:  # these import torch
    from maect.stages.objectives import ContrastiveObjective


class Tune(SelfSupervised):
    """Contrastive tuning of the upper part of the encoder (paper, tables 7 and 8)."""

    name: ClassVar[str] = "tune"
    title: ClassVar[str] = "Contrastive tuning of {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("head", "pretrain", "import")

    base_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    layer_decay: float = Field(gt=0, le=1)
    frozen_blocks: int = Field(ge=0)
    encoder_ema: float = Field(ge=0, lt=1)
    head: Contrastive

    @model_validator(mode="after")
    def _consistent(self) -> "Tune":
        return self.check_contrastive()

    def takes(self, source: Stage) -> tuple[str, ...]:
        """The encoder, and the head where the source leaves one."""
        return source.leaves

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse to freeze every block."""
        super().check_encoder(encoder)
        if self.frozen_blocks >= encoder.depth:
            raise ValueError(
                f"frozen_blocks {self.frozen_blocks} leaves none of the "
                f"{encoder.depth} blocks to tune"
            )

    def check_source(self, encoder: Encoder, source: Stage, source_encoder: Encoder) -> None:
        """Refuse another encoder, and a head of another shape."""
        super().check_source(encoder, source, source_encoder)
        if isinstance(source, SelfSupervised) and source.head is not None:
            for key in ("queue_size", "projector_hidden", "predictor_hidden", "embedding"):
                ours, theirs = getattr(self.head, key), getattr(source.head, key)
                if ours != theirs:
                    raise ValueError(f"head.{key} {ours} differs from {theirs}")

    def objective(self, encoder: Encoder, seed: int) -> "ContrastiveObjective":
        """Encoder and head, with random weights."""
        from maect.models.heads import NNCLRHead
        from maect.models.vit import build_encoder, seeded
        from maect.stages.objectives import ContrastiveObjective

        with seeded(seed):
            vit, head = build_encoder(encoder), NNCLRHead(encoder.width, self.head)
        vit.freeze(self.frozen_blocks)
        vit.checkpointing = self.activation_checkpointing
        return ContrastiveObjective(self, vit, head, seed)

    def start_from(self, source: Path, objective: Any, encoder: Encoder) -> None:
        """Take over a run's encoder and, where it has one, its head."""
        from maect.stages.weights import load_head

        super().start_from(source, objective, encoder)
        if (source / "head.safetensors").exists():
            load_head(objective.head, source / "head.safetensors")

    def encoder_rates(self, name: str | None, depth: int) -> tuple[float, float]:
        """Lower for lower layers."""
        from maect.train.optimizer import layer_scale

        scale = 1.0 if name is None else layer_scale(name, depth, self.layer_decay)
        return self.scaled_lr(self.base_lr) * scale, self.weight_decay

    @property
    def encoder_average(self) -> float | None:
        """Momentum of the encoder's running average, which is what a run leaves."""
        return self.encoder_ema

    def flops_per_image(self, encoder: Encoder) -> float:
        """Operations of one training step, forward and backward over all views, per image."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        view = view_flops(encoder, tokens, self.frozen_blocks)
        return self.views * (view + head_flops(self.head, encoder.width, self.batch_size, True))

    def footprint(self, encoder: Encoder, images: int) -> Footprint:
        """Device memory of a pass over this many images on one rank."""
        tokens = encoder.prefix_tokens + visible_patches(encoder.patches, self.mask_ratio)
        tuned = encoder.depth - self.frozen_blocks
        head, learning = head_weights(self.head, encoder.width), trained_parameters(encoder, tuned)
        parts = [
            encoder_activations(self, encoder, tokens, tuned),
            head_activations(self, self.head, encoder.width),
        ]
        return footprint(
            self, encoder, self.views * images, parts,
            weights=parameters(encoder) + head, trained=learning + head, averaged=learning,
            buffers=head_buffers(self.head, encoder.width),
        )  # fmt: skip

    def state_bytes(self, encoder: Encoder) -> int:
        """Bytes that a finished run leaves, its averages included."""
        body = parameters(encoder)
        learnt = body + head_parameters(self.head, encoder.width)
        return self._state(learnt, body, learnt)
