"""Weights that stages take over from a run and leave behind; imports torch."""

import shutil
from functools import singledispatch
from pathlib import Path

import torch
from torch import Tensor, nn

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.models.heads import NNCLRHead, QueueHead
from maect.models.refiner import RefinerHeads
from maect.models.vit import Pooling, VisionEncoder, build_encoder
from maect.models.weights import (
    load_encoder_weights,
    load_tensors,
    save_encoder,
    save_tensors,
)
from maect.recipes import Contrastive, Encoder, HeadSettings, Refiner
from maect.train.checkpoint import PARAM, StateReader


def load_source(vit: VisionEncoder, encoder: Encoder, source: Path) -> Pooling:
    """Take over the encoder of a finished run, give its pooling; UserError: of another shape."""
    module, settings, pooling = load_encoder_weights(source / "encoder.safetensors")
    for key in encoder.shape:
        here, there = getattr(encoder, key), getattr(settings, key)
        if here != there:
            raise UserError(f"{source}: its encoder has {key} {there}, this run has {here}")
    vit.load_state_dict(module.state_dict())
    return pooling


@singledispatch
def build_head(settings: HeadSettings, encoder: Encoder) -> QueueHead:
    """A head, or several as one, with random weights; each kind of settings registers its own."""
    raise NotImplementedError(type(settings).__name__)


@build_head.register
def _(settings: Contrastive, encoder: Encoder) -> QueueHead:
    return NNCLRHead(encoder.width, settings)


@build_head.register
def _(settings: Refiner, encoder: Encoder) -> QueueHead:
    return RefinerHeads(encoder.width, settings, settings.read(encoder.depth))


def load_head(head: nn.Module, path: Path) -> None:
    """Take over projector, predictor and queue; the EMA projector starts at the projector."""
    assert isinstance(head, QueueHead)
    tensors, _ = load_tensors(path)
    try:
        head.take_over(tensors)
    except ValueError as error:
        raise UserError(
            f"{path}: {error}: its head settings differ from those of the run it starts from"
        ) from None


def export_encoder(
    folder: Path,
    encoder: Encoder,
    reader: StateReader,
    source: Path | None,
    pooling: Pooling,
    kind: str = PARAM,
) -> None:
    """Write `encoder.safetensors`: what was trained, and the rest as in the source."""
    if source is None:
        template: dict[str, Tensor] = build_encoder(encoder).state_dict()
    else:
        template = load_encoder_weights(source / "encoder.safetensors")[0].state_dict()
    trained = reader.part(kind, "encoder.", template)
    save_encoder(folder / "encoder.safetensors", template | trained, encoder, pooling)


def copy_encoder(source: Path, folder: Path) -> Pooling:
    """Copy the encoder of a run, to the byte; gives its pooling."""
    target = folder / "encoder.safetensors"
    with atomic_write(target) as temporary:
        shutil.copyfile(source / "encoder.safetensors", temporary)
    return load_encoder_weights(target)[2]


def export_head(
    path: Path, name: str, head: HeadSettings, encoder: Encoder, reader: StateReader
) -> None:
    """Write a head; `name` is its name in the objective."""
    with torch.device("meta"):
        shapes = build_head(head, encoder).exported()
    metadata = {"head": head.header, "width": str(encoder.width)}
    save_tensors(path, reader.part(PARAM, f"{name}.", shapes), metadata)
