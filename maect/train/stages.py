"""Builds a stage's objective from what it starts from, and writes what it ends with."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.models.decoder import Decoder
from maect.models.heads import NNCLRHead
from maect.models.vit import VisionEncoder, build_encoder, seeded
from maect.models.weights import load_encoder_weights, load_tensors, save_encoder, save_tensors
from maect.recipes import Encoder
from maect.stages.base import SelfSupervised as Stage
from maect.stages.head import Head
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune
from maect.train.objectives import ContrastiveObjective, MaskedAutoencoder, Objective
from maect.train.state import StateReader

EMA_PROJECTOR = "slow_projector."


def build_objective(stage: Stage, encoder: Encoder, seed: int, source: Path | None) -> Objective:
    """The stage's module on the CPU, with initial weights drawn from `seed` or taken from `source`.

    Raises:
        UserError: no source where one is needed, or one that does not fit.
    """
    with seeded(seed):
        vit = build_encoder(encoder)
        if isinstance(stage, Pretrain):
            decoder = Decoder(encoder)
            head = NNCLRHead(encoder.width, stage.head) if stage.head else None
            if source is not None:
                load_source(vit, encoder, source)
            vit.checkpointing = stage.activation_checkpointing
            return MaskedAutoencoder(
                vit,
                decoder,
                mask_ratio=stage.mask_ratio,
                normalize_pixels=stage.normalize_pixels,
                precision=stage.precision,
                head=head,
                pooling=encoder.ct_pooling,
                detached=stage.contrastive == "detached",
                weight=stage.contrastive_weight,
            )
        assert isinstance(stage, Head | Tune)
        head = NNCLRHead(encoder.width, stage.head)
    if source is None:
        raise UserError("head initialisation and tuning start from a pre-trained run: none given")
    load_source(vit, encoder, source)
    if isinstance(stage, Tune):
        if stage.frozen_blocks > encoder.depth:
            raise UserError(
                f"frozen_blocks {stage.frozen_blocks}: the encoder has {encoder.depth} blocks"
            )
        vit.freeze(stage.frozen_blocks)
        vit.checkpointing = stage.activation_checkpointing
        if (source / "head.safetensors").exists():
            load_head(head, source / "head.safetensors")
            head.start_ema()
    return ContrastiveObjective(
        vit,
        head,
        pooling=encoder.ct_pooling,
        precision=stage.precision,
        mask_ratio=stage.mask_ratio,
        train_encoder=isinstance(stage, Tune),
    )


def load_source(vit: VisionEncoder, encoder: Encoder, source: Path) -> None:
    """Take over the encoder of a finished run.

    Raises:
        UserError: it has another shape.
    """
    module, settings, _ = load_encoder_weights(source / "encoder.safetensors")
    for key in ("image_size", "patch_size", "width", "depth", "heads", "class_token", "registers"):
        here, there = getattr(encoder, key), getattr(settings, key)
        if here != there:
            raise UserError(f"{source}: its encoder has {key} {there}, this run has {here}")
    vit.load_state_dict(module.state_dict())


def load_head(head: NNCLRHead, path: Path) -> None:
    """Take over projector, predictor and queue.

    Raises:
        UserError: they have other shapes.
    """
    tensors, _ = load_tensors(path)
    own = {k: v for k, v in head.state_dict().items() if not k.startswith(EMA_PROJECTOR)}
    for name, value in own.items():
        if name not in tensors or tensors[name].shape != value.shape:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{path}: {name} is {found}, this recipe needs {list(value.shape)}: "
                "its head settings differ from those of the run it starts from"
            )
    head.load_state_dict(tensors, strict=False)


def saved_buffers(objective: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of the state: queue, statistics, EMA projector, positions."""
    kept = objective.state_dict().keys()
    return {name: value for name, value in objective.named_buffers() if name in kept}


def restore_module(objective: Objective, reader: StateReader) -> None:
    """Load trained parameters and buffers of a state into an objective on the CPU."""
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.full("param", name, parameter.shape))
        for name, value in saved_buffers(objective).items():
            value.copy_(reader.buffer(name))


def export(
    folder: Path, stage: Stage, encoder: Encoder, reader: StateReader, source: Path | None
) -> str:
    """Write encoder.safetensors and head.safetensors from a stage's final state.

    Returns:
        How evaluations pool this encoder.
    """
    pooling = encoder.ct_pooling if isinstance(stage, Tune) else encoder.mae_pooling
    target = folder / "encoder.safetensors"
    if isinstance(stage, Head):
        assert source is not None
        with atomic_write(target) as temporary:  # unchanged: the same bytes
            shutil.copyfile(source / "encoder.safetensors", temporary)
        pooling = load_encoder_weights(target)[2]
    else:
        if source is None:
            template: dict[str, Tensor] = build_encoder(encoder).state_dict()
        else:
            template = load_encoder_weights(source / "encoder.safetensors")[0].state_dict()
        kind = "ema" if isinstance(stage, Tune) else "param"
        trained = part(reader, kind, "encoder.", template)
        save_encoder(target, template | trained, encoder, pooling)
    settings: Any = getattr(stage, "head", None)
    if settings is not None:
        shapes = NNCLRHead(encoder.width, settings).state_dict()
        shapes = {k: v for k, v in shapes.items() if not k.startswith(EMA_PROJECTOR)}
        tensors = part(reader, "param", "head.", shapes)
        metadata = {"head": settings.model_dump_json(), "width": str(encoder.width)}
        save_tensors(folder / "head.safetensors", tensors, metadata)
    return pooling


def part(reader: StateReader, kind: str, prefix: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """One part's parameters (of `kind`) and buffers out of a state, under their own names."""
    found = {}
    for name in reader.names(kind):
        if name.startswith(prefix):
            own = name.removeprefix(prefix)
            found[own] = reader.full(kind, name, like[own].shape)
    for name in reader.names("buffer"):
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and own in like:
            found[own] = reader.buffer(name)
    return found
