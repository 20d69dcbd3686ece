"""Weights on disk: safetensors with the model's settings in the file's metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maect.core.arrays import sort_metadata
from maect.core.errors import UserError
from maect.core.files import atomic_write, check_file
from maect.models.foreign import TimmEncoder, build_foreign
from maect.models.vit import Pooling, VisionEncoder, build_encoder
from maect.recipes import Encoder

HEAD = "head."
"""Prefix of the names of a classifier's weights, in timm and in published files."""


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write named tensors and metadata atomically; the same values give the same bytes."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic_write(path) as temporary:
        save_file(plain, temporary, {"format": "pt", **metadata})
        sort_metadata(temporary)


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read named tensors and metadata; UserError if the file is missing or damaged."""
    try:
        check_file(path)
        with safe_open(str(path), "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (FileNotFoundError, SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def save_encoder(
    path: str | Path, state_dict: Mapping[str, Tensor], encoder: Encoder, pooling: Pooling
) -> None:
    """Write an encoder: timm's names and shapes, its settings and pooling as metadata."""
    metadata = {"encoder": encoder.header, "pooling": pooling}
    save_tensors(path, state_dict, metadata)


def load_any_encoder(path: str | Path) -> tuple[VisionEncoder | TimmEncoder, Encoder, Pooling]:
    """Build the encoder that a file holds, a plain ViT or another model.

    Returns:
        The module in float32 on the CPU in eval mode, its settings, and how to pool its tokens. A
        classifier on it is left out.

    Raises:
        UserError: not a file that `save_encoder` has written.
    """
    tensors, metadata = load_tensors(path)
    try:
        settings = Encoder.model_validate(json.loads(metadata["encoder"]))
        pooling = metadata["pooling"]
    except (KeyError, ValueError, ValidationError):
        raise UserError(f"{path}: no encoder settings in its metadata") from None
    if pooling not in get_args(Pooling):
        raise UserError(f"{path}: unknown pooling {pooling!r}")
    module: VisionEncoder | TimmEncoder
    try:
        if settings.foreign is not None:
            module = build_foreign(settings)
            module.module.load_state_dict(tensors)
        else:
            with torch.device("meta"):  # nothing is drawn that the file replaces
                module = build_encoder(settings)
                if pooling == "fc_norm":
                    module.norm_after_pooling()
            own = {name: value for name, value in tensors.items() if not name.startswith(HEAD)}
            # Copies, as the tensors of a file are mapped.
            own = {name: value.to(torch.float32, copy=True) for name, value in own.items()}
            module.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise UserError(f"{path}: weights do not fit their own settings: {error}") from None
    return module.eval(), settings, pooling  # type: ignore[return-value]


def load_encoder_weights(path: str | Path) -> tuple[VisionEncoder, Encoder, Pooling]:
    """Build the plain ViT that a file holds, as `load_any_encoder`; UserError if it is another."""
    module, settings, pooling = load_any_encoder(path)
    if isinstance(module, TimmEncoder):
        raise UserError(f"{path}: {settings.foreign}, which is no plain ViT")
    return module, settings, pooling
