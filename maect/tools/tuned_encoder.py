"""Encoders that `maect tune` continues: a public name, a run, an exported folder or a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from maect.answers.public import PUBLIC, find_weights
from maect.core.errors import UserError, did_you_mean
from maect.models.layouts import LAYOUTS
from maect.recipes import Encoder, load_encoder, sizes
from maect.recipes.timm_encoders import TimmEntry, find_timm
from maect.records import ENCODER

OWN_LAYOUTS = ("mae", "mae_ct", "dino")
"""Layouts whose names are ours; they differ in how evaluations pool."""
INSTEAD = "take a plain ViT, such as dinov2_small or mae_base (docs/weights.md)"


@dataclass(frozen=True)
class Start:
    """An encoder to continue.

    Attributes:
        name: of it, for messages.
        size: of the encoder, whose recipes hold for it.
        encoder: its shape, and how it reads images.
        imported: how an experiment imports it: `weights`, and `layout` and `size` or `timm`.
    """

    name: str
    size: str
    encoder: Encoder
    imported: dict[str, Any]


def find_start(given: str) -> Start:
    """Find an encoder and how an experiment imports it.

    Raises:
        UserError: there is none, or it cannot be trained.
    """
    path = Path(given)
    if not path.exists():
        if given in PUBLIC:
            return _checked(_of_public(given))
        raise UserError(
            f"{given}: no such folder or file, and no public encoder; {did_you_mean(given, PUBLIC)}"
        )
    if path.is_dir():
        for name in (ENCODER, "model.safetensors"):
            if (file := path / name).is_file():
                return _checked(_of_own(path.name, file))
        raise UserError(f"{given}: has no {ENCODER}; name a finished run or an exported folder")
    return _checked(_of_file(path))


def _checked(start: Start) -> Start:
    """Refuse an encoder without [CLS] token, which no stage trains."""
    if not start.encoder.class_token:
        raise UserError(f"{start.name}: cannot be trained: it has no [CLS] token; {INSTEAD}")
    return start


def _of_public(name: str) -> Start:
    public = PUBLIC[name]
    if public.timm is None:
        return _of_file(find_weights(name), name)
    known = find_timm(public.timm)
    if not known.plain:
        raise UserError(f"{name}: cannot be trained: {_reason(known)}; {INSTEAD}")
    encoder = known.encoder(public.image_size)
    weights = str(find_weights(name).absolute())
    return Start(name, known.size, encoder, {"timm": known.name, "weights": weights})


def _reason(known: TimmEntry) -> str:
    """Return why an encoder of timm is no plain ViT."""
    if known.architecture == "Eva":
        return "its positions are rotary"
    if known.architecture != "VisionTransformer":
        return f"it is a {known.architecture}, no plain ViT"
    return "its blocks are not those of a plain ViT"


def _of_file(path: Path, name: str = "") -> Start:
    """Read a file of weights: one of ours by its settings, others by their names."""
    name = name or path.name
    if path.suffix == ".safetensors" and _header(path):
        return _of_own(name, path)
    from maect.models.checkpoints import convert, find_layout, read_checkpoint

    checkpoint = read_checkpoint(path)
    layout = find_layout(checkpoint, path.name)
    new = convert(checkpoint, layout, path.name)
    try:
        new.encoder.check_trainable()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    imported = {"weights": str(path.absolute()), "layout": layout, "size": new.size}
    return Start(name, new.size, new.encoder, imported)


def _header(path: Path) -> dict[str, str]:
    """Return the settings in a file's metadata; {} if it has none."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    return metadata if {"encoder", "pooling"} <= metadata.keys() else {}


def _of_own(name: str, path: Path) -> Start:
    """Find size and layout by which the file of a run, or of an exported one, is imported."""
    header = _header(path)
    if not header:
        raise UserError(f"{path}: no encoder of ours; name a file of weights, or a public encoder")
    encoder = Encoder.model_validate(json.loads(header["encoder"]))
    try:
        encoder.check_trainable()
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    plain = encoder.model_copy(update={"resize": None})
    for size in sizes():
        usual = load_encoder(size)
        if encoder.image_size % usual.patch_size:
            continue
        shape = load_encoder(size, encoder.image_size, encoder.pixels)
        for layout in OWN_LAYOUTS:
            pooling = LAYOUTS[layout].pooling
            read = getattr(usual, pooling, pooling)
            same = shape.model_copy(update=LAYOUTS[layout].shape) == plain
            if same and read == header["pooling"]:
                imported = {"weights": str(path.absolute()), "layout": layout, "size": size}
                return Start(name, size, encoder, imported)
    raise UserError(
        f"{name}: cannot be imported again: its shape with {encoder.registers} registers, norms "
        f"{encoder.norm} and pooling {header['pooling']} is none of the sizes; name the published "
        "file or public encoder that it began with"
    )
