"""Conversion of public checkpoints into encoders, without running code that is in them.

`UserError` is raised for a file that is missing, damaged or of another kind, for unexpected or
missing names, and for wrong shapes.
"""

import logging
import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.models.foreign import (
    build_foreign,
    check_tensors,
    create_for,
    fit_weights,
    stored_grid,
)
from maect.models.layouts import LAYOUTS, LEFT_OUT, REFINED_FROM, Layout, Location
from maect.models.vit import build_encoder, sincos_2d
from maect.models.weights import Pooling, load_tensors
from maect.recipes import Encoder, Pixels, like, load_encoder, sizes
from maect.recipes.timm_encoders import find_timm

log = logging.getLogger(__name__)


class _LeftOut:
    """A replacement for unneeded objects of a pickle; takes any state and keeps nothing."""

    def __new__(cls, *_: Any) -> "_LeftOut":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a PyTorch checkpoint (`.pth`, `.pth.tar`, `.th`, `.pt`) or a `.safetensors` file.

    Tensors, containers and plain values are read on the CPU and, if the format allows it, page by
    page as they are used. The pickle in a PyTorch checkpoint is not run: it may only ask for
    tensors and for names that `layouts.yaml` lists.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of weights")
    if path.suffix == ".safetensors":
        return dict(load_tensors(path)[0])
    try:
        stands_for = [(_LeftOut, name) for name in (*LEFT_OUT.names, *_configuration(path))]
        with torch.serialization.safe_globals(stands_for):  # type: ignore[arg-type]
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:  # a damaged file may fail anywhere in the reader
        raise UserError(f"{path}: {_reading_fault(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not named weights")
    return content


def _reading_fault(error: Exception) -> str:
    """Return one line on a file that PyTorch's reader refuses or cannot read."""
    # What stands before is advice to run the file.
    text = str(error).rpartition("Unpickler error:")[2].strip() or type(error).__name__
    wanted = re.search(r"GLOBAL:? (\S+)", text) or re.search(r"got (?!the file)(.+)", text)
    if isinstance(error, pickle.UnpicklingError) and wanted is not None:
        return (
            f"refused, since reading it would run {wanted[1]}; a checkpoint may hold tensors and "
            "plain values only"
        )
    return (
        f"not a checkpoint that PyTorch can read ({text.splitlines()[0]}); compare its size with "
        "the published one, and download it again"
    )


def _configuration(path: Path) -> list[str]:
    """Return the full names of configuration classes in a checkpoint, to replace by `_LeftOut`."""
    if not zipfile.is_zipfile(path):
        return []
    asked: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    found = [name for name in asked if name.startswith(LEFT_OUT.packages)]
    if any(name.startswith("omegaconf.") for name in found):
        found += [name for name in asked if name in LEFT_OUT.of_omegaconf]
    return found


PATCHES = "patch_embed.proj.weight"


@dataclass(frozen=True)
class Converted:
    """An encoder from a checkpoint: tensors under our names in float32, and its settings."""

    tensors: dict[str, Tensor]
    size: str
    encoder: Encoder
    pooling: Pooling
    left_out: dict[str, int]
    """Number of tensors that are not the encoder's, by the pattern of their names."""
    timm: str | None = None
    """timm's name of the model, if it was imported by it."""
    layer_scale_folded: bool = False


def find_layout(checkpoint: Mapping[str, Any], file: str) -> str:
    """Return the layout of a checkpoint, detected by its names and its position embedding.

    MAE encoders and the authors' MAE-CT releases may have the same names. If they are pooled in
    different ways, the name of the file decides (`maect...` or `mae_...`, as published).

    Raises:
        UserError: no layout fits, or several do.
    """
    fitting = [name for name in LAYOUTS if _fits(checkpoint, LAYOUTS[name])]
    fitting.sort(key=lambda name: LAYOUTS[name].mark is None)  # a mark decides
    if not fitting:
        raise UserError(
            f"{file}: fits none of the layouts {', '.join(LAYOUTS)}; name a model of timm with "
            f"--timm (docs/weights.md); its first entries: {', '.join(map(str, [*checkpoint][:5]))}"
        )
    if fitting[0] == "mim_refiner":
        named = [name for part, name in REFINED_FROM.items() if part in file.lower()]
        if not named:
            raise UserError(
                f"{file}: fits mim_refiner (pooling: cls) and mim_refiner_mean (pooling: mean, "
                "CrossMAE's); say which with --layout"
            )
        return named[0]
    if "mae_ct" in fitting:
        if file.startswith("maect"):
            return "mae_ct"
        tensors, _, _ = _select(checkpoint, LAYOUTS["mae_ct"], file)
        shape = load_encoder(find_size(tensors, file))
        if shape.mae_pooling != shape.ct_pooling and not file.startswith("mae_"):
            raise UserError(
                f"{file}: fits mae (pooling: {shape.mae_pooling}) and mae_ct (pooling: "
                f"{shape.ct_pooling}); say which with --layout"
            )
    return fitting[0]


def _locate(
    checkpoint: Mapping[str, Any], layout: Layout
) -> tuple[Location, Mapping[str, Any]] | None:
    """Return the location that holds an encoder, and the state dict there; None: there is none."""
    for location in layout.locations:
        values = checkpoint.get(location.entry) if location.entry else checkpoint
        if isinstance(values, Mapping) and location.to_layout_name(PATCHES) in values:
            return location, values
    return None


def _fits(checkpoint: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether a checkpoint's names and positions are those of a layout."""
    located = _locate(checkpoint, layout)
    if located is None:
        return False
    location, values = located
    named = {location.to_our_name(name): value for name, value in values.items()}
    if ("cls_token" in named) != layout.class_token:
        return False
    tokens = named.get("cls_token")
    if isinstance(tokens, Tensor) and tokens.ndim == 3 and tokens.shape[1] != layout.class_tokens:
        return False
    theirs = [name.removeprefix(location.prefix) for name in values]
    if not all(any(name.startswith(old) for name in theirs) for old, _ in location.renamed):
        return False
    if layout.mark is not None and layout.mark not in values:
        return False
    if layout.mae_positions is None:
        return True
    return _is_maes(named.get("pos_embed")) == layout.mae_positions


def _is_maes(positions: Any) -> bool:
    """Return whether a position embedding [1, L or 1 + L, D] is MAE's sine-cosine table."""
    if not isinstance(positions, Tensor) or positions.ndim != 3 or positions.shape[2] % 4:
        return False
    table = sincos_2d(positions.shape[2], math.isqrt(positions.shape[1]))[0]
    rows = positions[0, positions.shape[1] - len(table) :].float()
    return torch.allclose(rows, table, atol=2e-3)  # tables may be stored in float16


def _select(
    checkpoint: Mapping[str, Any], layout: Layout, where: str
) -> tuple[dict[str, Tensor], str, dict[str, int]]:
    """Return the encoder's tensors by our names, their prefix, and counts of others by pattern."""
    located = _locate(checkpoint, layout)
    if located is None:
        names = (
            f"{p.to_layout_name(PATCHES)} " + (f"in {p.entry!r}" if p.entry else "at its top")
            for p in layout.locations
        )
        raise UserError(f"{where}: no {' and no '.join(names)}")
    location, values = located
    tensors: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for name, value in values.items():
        pattern = next((p for p in location.dropped if fnmatchcase(name, p)), None)
        if pattern is None:
            tensors[location.to_our_name(name)] = value
        else:
            left_out[pattern] += 1
    return tensors, location.prefix, dict(left_out)


def find_size(tensors: Mapping[str, Tensor], where: str) -> str:
    """Return the encoder size with the patch size, width, depth and registers of tensors.

    The number of heads is the size's, since tensors do not show it. If several sizes fit, it is the
    one that the others are `like`.

    Raises:
        UserError: no size fits, or several do.
    """
    patches = tensors["patch_embed.proj.weight"]
    if patches.ndim != 4:
        raise UserError(
            f"{where}: patch_embed.proj.weight is {list(patches.shape)}, no convolution"
        )
    depth = len({m[1] for m in (re.match(r"blocks\.(\d+)\.", name) for name in tensors) if m})
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    seen = (patches.shape[3], patches.shape[0], depth, registers)
    shapes = {name: load_encoder(name) for name in sizes()}
    fitting = {
        name for name, s in shapes.items() if (s.patch_size, s.width, s.depth, s.registers) == seen
    }
    fitting = {name for name in fitting if not fitting & set(like(name)[1:])}
    if len(fitting) != 1:
        extra = f", {registers} registers" if registers else ""
        raise UserError(
            f"{where}: patch size {seen[0]}, width {seen[1]}{extra} and {depth} blocks are those "
            f"of {' and '.join(sorted(fitting)) or 'none of the sizes ' + ', '.join(shapes)}"
        )
    return fitting.pop()


def convert(
    checkpoint: Mapping[str, Any],
    name: str,
    file: str,
    size: str | None = None,
    image_size: int | None = None,
    pixels: Pixels | None = None,
) -> Converted:
    """Take the encoder out of a checkpoint.

    The positions of [CLS] and registers, where there are any, are added to the tokens, as in the
    authors' `vit_mae.load_state_dict`. Those of the patches are kept as stored; for another image
    size they are interpolated bicubically.

    Args:
        checkpoint: as `read_checkpoint` returns it.
        name: of its layout.
        file: name of the file, for messages.
        size: of the encoder; None: detected.
        image_size: to use the encoder at; None: its own.
        pixels: of its images; for another number of channels than three, the weights of the
            patches are adapted as timm does: summed for one channel, else repeated in turn and
            scaled by 3 / channels.
    """
    layout = LAYOUTS[name]
    where = f"{file}: layout {name}"
    tensors, prefix, left_out = _select(checkpoint, layout, where)
    if not layout.final_norm:
        width = tensors[PATCHES].shape[0]
        tensors |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    size = size or find_size(tensors, where)
    class_tokens = tensors.get("cls_token")
    if layout.class_tokens > 1 and isinstance(class_tokens, Tensor):
        tensors |= {"cls_token": class_tokens[:, :1], "reg_token": class_tokens[:, 1:]}
    own, encoder = _fitted(tensors, size, layout.shape, image_size, pixels, where, prefix)
    pooling = layout.pooling
    if pooling == "mae_pooling":
        pooling = load_encoder(size).mae_pooling
    elif pooling == "ct_pooling":
        pooling = load_encoder(size).ct_pooling
    return Converted(own, size, encoder, pooling, left_out)


def convert_timm(
    checkpoint: Mapping[str, Any],
    name: str,
    file: str,
    image_size: int | None = None,
    pixels: Pixels | None = None,
) -> Converted:
    """Take the weights of a model of timm out of a checkpoint.

    A plain ViT becomes an encoder of ours, with the positions of [CLS] added to it and LayerScale
    folded; any other stays timm's module, whose names the tensors keep.

    Args:
        checkpoint: as `read_checkpoint` returns it.
        name: timm's, of the table of encoders.
        file: name of the file, for messages.
        image_size: to use it at; None: its own. Positions of the file are interpolated once: for
            plain ViTs without LayerScale as `convert` does, for all others as timm does.
        pixels: how files are read; mean and standard deviation are timm's.
    """
    known = find_timm(name)
    encoder = known.encoder(image_size, pixels)
    where = f"{file}: {known.name}"
    side = encoder.image_size
    if known.plain and not known.layer_scale:
        side = known.patch_size * stored_grid(
            checkpoint, known.image_size // known.patch_size, where
        )
        if image_size is None and side != encoder.image_size:
            log.warning(
                "%s: its positions are those of %d pixels, interpolated to %d; --image-size %d (in "
                "an experiment image_size: %d) keeps them",
                where, side, encoder.image_size, side, side,
            )  # fmt: skip
    with torch.device("meta"):
        module = create_for(known.name, side)
    tensors, left_out = fit_weights(module, checkpoint, where)
    if known.plain:
        tensors = fold_layer_scale(tensors)
        change = {"class_token": known.class_token, "registers": known.registers}
        tensors, _ = _fitted(tensors, known.size, change, encoder.image_size, None, where, "")
    folded = known.plain and known.layer_scale
    return Converted(tensors, known.size, encoder, known.pooling, left_out, known.name, folded)


def fold_layer_scale(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the last matrices of attention and MLP by the LayerScale vectors that follow.

    `gamma * (W x + b)` is `(gamma W) x + gamma b`, with gamma [D], W [D, H] and b [D] (LayerScale:
    Touvron et al. 2021, "Going deeper with Image Transformers").

    Args:
        tensors: a ViT's under timm's names, with LayerScale as `ls1.gamma` and `ls2.gamma` of a
            block, or without.
    """
    folded = {name: value for name, value in tensors.items() if not name.endswith(".gamma")}
    for name in tensors.keys() - folded.keys():
        block, _, which = name.removesuffix(".gamma").rpartition(".")
        gamma = tensors[name]
        last = f"{block}.attn.proj" if which == "ls1" else f"{block}.mlp.fc2"
        folded[f"{last}.weight"] = folded[f"{last}.weight"] * gamma[:, None]
        folded[f"{last}.bias"] = folded[f"{last}.bias"] * gamma
    return folded


def _fitted(
    tensors: dict[str, Any],
    size: str,
    change: dict[str, Any],
    image_size: int | None,
    pixels: Pixels | None,
    where: str,
    prefix: str,
) -> tuple[dict[str, Tensor], Encoder]:
    """Return tensors and settings of an encoder, for an image size and a number of channels."""
    has_positions = "module" not in change
    side = _stored_side(tensors, size, change, where) if has_positions else None
    stored = load_encoder(size, side).model_copy(update=change)
    check_tensors(tensors, _expected(stored), f"{where}, size {size}", prefix)
    encoder = load_encoder(size, image_size or stored.image_size, pixels).model_copy(update=change)
    own = {key: value.float() for key, value in tensors.items()}
    own[PATCHES] = adapt_input_conv(encoder.pixels.channels, own[PATCHES])
    if has_positions:
        _fit_positions(own, encoder)
    return own, encoder


def _stored_side(tensors: dict[str, Any], size: str, change: dict[str, Any], where: str) -> int:
    """Return the image size of a position table, which is padded with rows for prefix tokens."""
    shape = load_encoder(size)
    positions = tensors.get("pos_embed")
    if isinstance(positions, Tensor) and positions.ndim == 4:  # [1, rows, columns, D]
        positions = tensors["pos_embed"] = positions.flatten(1, 2)
    if not isinstance(positions, Tensor) or positions.ndim != 3:
        raise UserError(f"{where}: no pos_embed of three dimensions")
    prefix_tokens = shape.model_copy(update=change).prefix_tokens
    grid = math.isqrt(max(0, positions.shape[1] - prefix_tokens))
    if grid**2 != positions.shape[1] - prefix_tokens:  # without rows for [CLS] and registers
        grid = math.isqrt(positions.shape[1])
        tensors["pos_embed"] = F.pad(positions, (0, 0, prefix_tokens, 0))
    return grid * shape.patch_size


@cache
def _expected(encoder: Encoder) -> dict[str, Tensor]:
    """Return an encoder's state dict on the meta device."""
    with torch.device("meta"):
        foreign = encoder.foreign is not None
        module = build_foreign(encoder).module if foreign else build_encoder(encoder)
        return module.state_dict()


def _fit_positions(tensors: dict[str, Tensor], encoder: Encoder) -> None:
    """Add the positions of [CLS] and registers to them; interpolate those of patches."""
    prefix_tokens = encoder.prefix_tokens
    prefix, patches = tensors["pos_embed"].tensor_split([prefix_tokens], dim=1)
    grid = encoder.image_size // encoder.patch_size
    patches = resample_abs_pos_embed(patches, [grid, grid], num_prefix_tokens=0, antialias=False)
    if encoder.class_token:
        tensors["cls_token"] = tensors["cls_token"] + prefix[:, :1]
    if encoder.registers:
        tensors["reg_token"] = tensors["reg_token"] + prefix[:, -encoder.registers :]
    tensors["pos_embed"] = F.pad(patches, (0, 0, prefix_tokens, 0))
