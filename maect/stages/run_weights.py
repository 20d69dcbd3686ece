"""Reading and writing of the weights of runs, for stages; imports torch."""

import shutil
from pathlib import Path

from torch import Tensor, nn

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.models.heads import QueueHead
from maect.models.vit import Pooling, VisionEncoder, build_encoder
from maect.models.weights import (
    load_encoder_weights,
    load_tensors,
    save_encoder,
    save_tensors,
)
from maect.recipes import Encoder
from maect.train.checkpoint import PARAM, StateReader


def load_source(vit: VisionEncoder, encoder: Encoder, source: Path) -> Pooling:
    """Load the encoder of a finished run; return its pooling.

    Raises:
        UserError: it has another shape.
    """
    module, settings, pooling = load_encoder_weights(source / "encoder.safetensors")
    for key in encoder.shape:
        here, there = getattr(encoder, key), getattr(settings, key)
        if here != there:
            raise UserError(f"{source}: its encoder has {key} {there}, this run has {here}")
    vit.load_state_dict(module.state_dict())
    return pooling


def load_head(head: nn.Module, path: Path) -> None:
    """Load projector, predictor and queue; the EMA projector starts at the projector.

    Raises:
        UserError: the file's head has another shape.
    """
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
    """Write `encoder.safetensors`: trained parameters, and the others as in the source.

    Args:
        folder: of the run.
        encoder: its shape.
        reader: of the final state.
        source: folder of the run that it started from, if any.
        pooling: for the file's metadata.
        kind: of the values in the state: `PARAM` or `AVERAGE`.
    """
    if source is None:
        template: dict[str, Tensor] = build_encoder(encoder).state_dict()
    else:
        template = load_encoder_weights(source / "encoder.safetensors")[0].state_dict()
    trained = reader.part(kind, "encoder.", template)
    save_encoder(folder / "encoder.safetensors", template | trained, encoder, pooling)


def copy_encoder(source: Path, folder: Path) -> Pooling:
    """Copy the encoder's file of a run; return its pooling."""
    target = folder / "encoder.safetensors"
    with atomic_write(target) as temporary:
        shutil.copyfile(source / "encoder.safetensors", temporary)
    return load_encoder_weights(target)[2]


def export_head(
    path: Path, name: str, objective: nn.Module, about: dict[str, str], reader: StateReader
) -> None:
    """Write a head to its file.

    Args:
        path: of the file.
        name: of the head in the objective.
        objective: of the stage, for the shapes.
        about: metadata.
        reader: of the final state.
    """
    head = objective.get_submodule(name)
    assert isinstance(head, QueueHead)
    save_tensors(path, reader.part(PARAM, f"{name}.", head.exported()), about)
