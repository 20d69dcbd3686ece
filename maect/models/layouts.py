"""Layouts of public weights: where in a checkpoint the encoder is, and what to make of it."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.models.positions import sincos_2d
from maect.models.vit import build_encoder
from maect.recipes import Encoder, load_encoder, sizes


@dataclass(frozen=True)
class Place:
    """Where a checkpoint may hold an encoder.

    Attributes:
        entry: of the checkpoint, with the state dict; "": the checkpoint is one itself.
        prefix: of the encoder's names in it.
        dropped: patterns of full names that are not the encoder's; any other name is an error.
    """

    entry: str
    prefix: str = ""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One way in which weights are published.

    Attributes:
        places: where the encoder may be.
        pooling: how its evaluations pool: one for all sizes, or what the size says about MAE or
            about contrastive tuning.
        class_token: whether it has a [CLS] token.
        mae_positions: whether its position embedding is MAE's sine-cosine table: what tells apart
            layouts with the same names. None: not looked at.
    """

    places: tuple[Place, ...]
    pooling: Literal["cls", "mean", "mae_pooling", "ct_pooling"] = "cls"
    class_token: bool = True
    mae_positions: bool | None = None


def _moco(kept: str, other: str) -> Place:
    """One of the two encoders that MoCo v3 trains."""
    dropped = (f"module.{kept}.head.*", f"module.{other}.*", "module.predictor.*")
    return Place("state_dict", f"module.{kept}.", dropped)


# Tried from top to bottom. docs/weights.md has their sources.
LAYOUTS: dict[str, Layout] = {
    "mae": Layout(
        tuple(
            Place(entry, dropped=("decoder_*", "mask_token"))
            for entry in ("model", "state_dict", "")
        ),
        "mae_pooling",
        mae_positions=True,
    ),
    "mae_ct": Layout((Place("state_dict"), Place("")), "ct_pooling", mae_positions=True),
    "layer_grafting": Layout((_moco("momentum_encoder", "base_encoder"),), mae_positions=True),
    "moco_v3": Layout(
        (
            _moco("base_encoder", "momentum_encoder"),
            Place("state_dict", "module.", ("module.head.*",)),
        )
    ),
    "msn": Layout((Place("target_encoder", "module.", ("module.fc.*",)),)),
    "ijepa": Layout((Place("target_encoder", "module."),), "mean", class_token=False),
    "ibot": Layout(
        (
            Place("state_dict", dropped=("head.*", "masked_embed")),
            Place("teacher", "backbone.", ("head.*", "backbone.masked_embed")),
        ),
        mae_positions=False,
    ),
    "dino": Layout((Place(""),), mae_positions=False),
}


@dataclass(frozen=True)
class Converted:
    """An encoder out of a checkpoint: tensors under our names in float32, and what they are."""

    tensors: dict[str, Tensor]
    size: str
    encoder: Encoder
    pooling: Literal["cls", "mean"]
    left_out: dict[str, int]
    """How many tensors beside the encoder's there are, by the pattern of their names."""


def find_layout(checkpoint: Mapping[str, Any], file: str) -> str:
    """Name of the layout of a checkpoint, from its names and its position embedding.

    MAE encoders and the authors' MAE-CT releases may hold the same names. If that leaves open
    how they are pooled, the name of the file decides (`maect...` or `mae_...`, as published).

    Args:
        checkpoint: what the file holds.
        file: the file's name.

    Raises:
        UserError: none fits, or two do and the file's name does not say which.
    """
    found = [name for name in LAYOUTS if _fits(checkpoint, LAYOUTS[name])]
    if not found:
        entries = ", ".join(list(checkpoint)[:5])
        raise UserError(
            f"{file}: fits none of the layouts {', '.join(LAYOUTS)}; its first entries: {entries}"
        )
    if "mae_ct" in found:
        if file.startswith("maect"):
            return "mae_ct"
        tensors = _select(checkpoint, LAYOUTS["mae_ct"], file)[0]
        shape = load_encoder(find_size(tensors, file))
        if shape.mae_pooling != shape.ct_pooling and not file.startswith("mae_"):
            raise UserError(
                f"{file}: fits mae (pooling: {shape.mae_pooling}) and mae_ct (pooling: "
                f"{shape.ct_pooling}); say which with --layout"
            )
    return found[0]


def _find(checkpoint: Mapping[str, Any], layout: Layout) -> tuple[Place, Mapping[str, Any]] | None:
    """The place that holds an encoder's tensors, if there is one, and the state dict there."""
    for place in layout.places:
        values = checkpoint.get(place.entry) if place.entry else checkpoint
        if isinstance(values, Mapping) and f"{place.prefix}patch_embed.proj.weight" in values:
            return place, values
    return None


def _fits(checkpoint: Mapping[str, Any], layout: Layout) -> bool:
    found = _find(checkpoint, layout)
    if found is None:
        return False
    prefix, values = found[0].prefix, found[1]
    if (f"{prefix}cls_token" in values) != layout.class_token:
        return False
    if layout.mae_positions is None:
        return True
    return _is_maes(values.get(f"{prefix}pos_embed")) == layout.mae_positions


def _is_maes(positions: Any) -> bool:
    """Whether a position embedding [1, L or 1 + L, D] is MAE's sine-cosine table."""
    if not isinstance(positions, Tensor) or positions.ndim != 3 or positions.shape[2] % 4:
        return False
    table = sincos_2d(positions.shape[2], math.isqrt(positions.shape[1]))[0]
    rows = positions[0, positions.shape[1] - len(table) :].float()
    return torch.allclose(rows, table, atol=2e-3)  # also of tables that were stored in float16


def _select(
    checkpoint: Mapping[str, Any], layout: Layout, where: str
) -> tuple[dict[str, Tensor], str, dict[str, int]]:
    """The encoder's tensors under their own names, their prefix, and how many others of which."""
    found = _find(checkpoint, layout)
    if found is None:
        names = (
            f"{p.prefix}patch_embed.proj.weight " + (f"in {p.entry!r}" if p.entry else "at its top")
            for p in layout.places
        )
        raise UserError(f"{where}: no {' and no '.join(names)}")
    place, values = found
    tensors: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for name, value in values.items():
        pattern = next((p for p in place.dropped if fnmatchcase(name, p)), None)
        if pattern is None:
            tensors[name.removeprefix(place.prefix)] = value
        else:
            left_out[pattern] += 1
    return tensors, place.prefix, dict(left_out)


def find_size(tensors: Mapping[str, Tensor], where: str) -> str:
    """The encoder size with the patch size, width and depth of these tensors.

    The number of heads cannot be seen in them: it is that of the size.

    Raises:
        UserError: there is no such size, or more than one.
    """
    patches = tensors["patch_embed.proj.weight"]
    if patches.ndim != 4:
        raise UserError(
            f"{where}: patch_embed.proj.weight is {list(patches.shape)}, no convolution"
        )
    depth = len({m[1] for m in (re.match(r"blocks\.(\d+)\.", name) for name in tensors) if m})
    seen = (patches.shape[3], patches.shape[0], depth)
    shapes = {name: load_encoder(name) for name in sizes()}
    fitting = [n for n, s in shapes.items() if (s.patch_size, s.width, s.depth) == seen]
    if len(fitting) != 1:
        raise UserError(
            f"{where}: patch size {seen[0]}, width {seen[1]} and {depth} blocks are those of "
            f"{' and '.join(fitting) or 'none of the sizes ' + ', '.join(shapes)}"
        )
    return fitting[0]


def convert(
    checkpoint: Mapping[str, Any],
    name: str,
    file: str,
    size: str | None = None,
    image_size: int | None = None,
) -> Converted:
    """Take the encoder out of a checkpoint.

    The [CLS] token's position, where there is one, is added to the token, as in the authors'
    `vit_mae.load_state_dict`. Positions are kept as stored; for another image size they are
    interpolated bicubically.

    Args:
        checkpoint: what the file holds.
        name: of its layout.
        file: to name in messages.
        size: of the encoder; none: from the tensors' shapes.
        image_size: to use the encoder at; none: its own.

    Raises:
        UserError: the checkpoint is not of this layout: a name that is missing, one too many, or
            a wrong shape.
    """
    layout, where = LAYOUTS[name], f"{file}: layout {name}"
    tensors, prefix, left_out = _select(checkpoint, layout, where)
    size = size or find_size(tensors, where)
    shape = load_encoder(size)
    positions = tensors.get("pos_embed")
    if not isinstance(positions, Tensor) or positions.ndim != 3:
        raise UserError(f"{where}: no pos_embed of three dimensions")
    grid = math.isqrt(positions.shape[1])
    if layout.class_token and positions.shape[1] == grid**2:  # without a row for [CLS]
        tensors["pos_embed"] = F.pad(positions, (0, 0, 1, 0))
    change = {"class_token": layout.class_token}
    stored = load_encoder(size, grid * shape.patch_size).model_copy(update=change)
    _check_names(tensors, stored, f"{where}, size {size}", prefix)
    encoder = load_encoder(size, image_size or stored.image_size).model_copy(update=change)
    own = {key: value.float() for key, value in tensors.items()}
    _place(own, grid, encoder)
    pooling = layout.pooling
    if pooling == "mae_pooling" or pooling == "ct_pooling":
        pooling = shape.mae_pooling if pooling == "mae_pooling" else shape.ct_pooling
    return Converted(own, size, encoder, pooling, left_out)


def _check_names(tensors: Mapping[str, Any], encoder: Encoder, where: str, prefix: str) -> None:
    """Every name of the encoder, no other, each of its shape.

    Raises:
        UserError: naming the first that is not so.
    """
    expected = _shapes(encoder)
    for name, value in tensors.items():
        if name not in expected:
            raise UserError(f"{where}: unexpected {name}")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(f"{where}: {prefix}{name} is no tensor of real numbers")
        if list(value.shape) != expected[name]:
            raise UserError(
                f"{where}: {prefix}{name} is {list(value.shape)} and should be {expected[name]}"
            )
    missing = next((name for name in expected if name not in tensors), None)
    if missing is not None:
        raise UserError(f"{where}: {prefix}{missing} is missing")


@cache
def _shapes(encoder: Encoder) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {k: list(v.shape) for k, v in build_encoder(encoder).state_dict().items()}


def _place(tensors: dict[str, Tensor], grid: int, encoder: Encoder) -> None:
    """Give [CLS] its position for good, and fit the patches' positions to the image size."""
    positions = tensors["pos_embed"]
    patches = positions[:, -(grid**2) :]
    wanted = encoder.image_size // encoder.patch_size
    if wanted != grid:
        cells = patches.unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
        cells = F.interpolate(cells, (wanted, wanted), mode="bicubic", align_corners=False)
        patches = cells.flatten(2).transpose(1, 2)
    if encoder.class_token:
        tensors["cls_token"] = tensors["cls_token"] + positions[:, :1]
        patches = F.pad(patches, (0, 0, 1, 0))
    tensors["pos_embed"] = patches
