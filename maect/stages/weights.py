"""Weights that stages take over from a run and leave behind; imports torch."""

import shutil
from pathlib import Path

from torch import Tensor, nn

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.models.heads import NNCLRHead
from maect.models.vit import Pooling, VisionEncoder, build_encoder
from maect.models.weights import (
    load_encoder_weights,
    load_tensors,
    save_encoder,
    save_tensors,
)
from maect.recipes import Contrastive, Encoder
from maect.train.checkpoint import PARAM, StateReader


def load_source(vit: VisionEncoder, encoder: Encoder, source: Path) -> None:
    """Take over the encoder of a finished run.

    Raises:
        UserError: it has another shape.
    """
    module, settings, _ = load_encoder_weights(source / "encoder.safetensors")
    for key in encoder.shape:
        here, there = getattr(encoder, key), getattr(settings, key)
        if here != there:
            raise UserError(f"{source}: its encoder has {key} {there}, this run has {here}")
    vit.load_state_dict(module.state_dict())


def load_head(head: nn.Module, path: Path) -> None:
    """Take over projector, predictor and queue; the EMA projector starts at the projector.

    Raises:
        UserError: they have other shapes.
    """
    assert isinstance(head, NNCLRHead)
    tensors, _ = load_tensors(path)
    for name, value in head.exported().items():
        if name not in tensors or tensors[name].shape != value.shape:
            there = list(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{path}: {name} is {there}, this recipe needs {list(value.shape)}: "
                "its head settings differ from those of the run it starts from"
            )
    head.load_state_dict(tensors, strict=False)
    head.start_ema()


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
    path: Path, name: str, head: Contrastive, encoder: Encoder, reader: StateReader
) -> None:
    """Write a head; `name` is its name in the objective."""
    shapes = NNCLRHead(encoder.width, head).exported()
    metadata = {"head": head.model_dump_json(), "width": str(encoder.width)}
    save_tensors(path, reader.part(PARAM, f"{name}.", shapes), metadata)
