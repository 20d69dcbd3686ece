"""Encoders that are no plain ViT: modules of timm, built by name, and CAPI's (Darcet et al. 2025).

CAPI's is written after facebookresearch/capi, `model.py`, with its names except those of the
patches. It has rotary positions with stored frequencies, registers on the image's edge in place of
[CLS], RMSNorm and no biases in the blocks. The final norm has no weights. The predictor is left
out.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

import timm
import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.models.vit import EncoderOutput, Norm, Pooling, initialize, pool_tokens
from maect.recipes import Encoder

EPS = 1e-5


class Rope(nn.Module):
    """Rotary positions: `freqs` [2, d] maps coordinates to angles of channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.zeros(2, width))

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Rotate channels of x [b, heads, N, d] by the angles of coordinates [N, 2]."""
        # Not a matrix product, which autocast would round.
        angles = coordinates[:, :1] * self.freqs[0] + coordinates[:, 1:] * self.freqs[1]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class Attention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.rope = Rope(width // heads)

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Compute attention of tokens [b, N, D] at coordinates [N, 2]."""
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rope(q, coordinates), self.rope(k, coordinates)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Residual branch: x + fn(norm(x))."""

    def __init__(self, width: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.fn = fn

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Add the branch to tokens [b, N, D]."""
        return x + self.fn(self.norm(x), *more)


class Block(nn.Module):
    """A transformer block: attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.residual1 = Residual(width, Attention(width, heads))
        self.residual2 = Residual(width, Mlp(width, 4 * width, bias=False))

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Compute the block on tokens [b, N, D] at coordinates [N, 2]."""
        return self.residual2(self.residual1(x, coordinates))


class Capi(nn.Module):
    """CAPI's encoder, with the interface that `TimmEncoder` needs."""

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        width, patch = settings.width, settings.patch_size
        embed = nn.Conv2d(settings.pixels.channels, width, patch, patch)
        self.patch_embed = nn.Sequential(OrderedDict(proj=embed))
        self.registers = nn.Parameter(torch.zeros(1, settings.registers, width))
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(width, eps=EPS, elementwise_affine=False)
        initialize(self)

    def forward_intermediates(
        self, images: Tensor, numbers: Sequence[int], **_: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """Return raw patch tokens [b, L, D] and registers [b, R, D] of blocks, by number.

        Args:
            images: [b, C, H, W], normalized.
            numbers: of the blocks, rising from 0.
        """
        x = self.patch_embed(images)
        rows, columns = x.shape[2:]
        coordinates = self.coordinates(rows, columns, x)
        x = x.flatten(2).transpose(1, 2)
        registers = self.registers.expand(len(x), -1, -1).to(x.dtype)
        count = registers.shape[1]
        x = torch.cat([registers, x], dim=1)
        found = []
        for number, block in enumerate(self.blocks):
            x = block(x, coordinates)
            if number in numbers:
                found.append((x[:, count:], x[:, :count]))
        return found

    def coordinates(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return row and column of each token, [R + rows * columns, 2] from 0 to 1.

        Registers lie on the edge, equally many on each side.
        """
        line = partial(torch.linspace, 0, device=like.device, dtype=self.registers.dtype)
        patches = torch.cartesian_prod(line(1, rows), line(1, columns))
        side = self.registers.shape[1] // 4
        along = line(side - 1, side) / side
        start, end = torch.zeros_like(along), torch.ones_like(along)
        edge = [(along, start), (end, along), (1 - along, end), (start, 1 - along)]
        return torch.cat([*(torch.stack(pair, dim=1) for pair in edge), patches])


def create(name: str, **options: Any) -> nn.Module:
    """Build timm's model without classifier and with random weights; nothing is downloaded."""
    return timm.create_model(name, pretrained=False, num_classes=0, **options)


def takes_size(module: nn.Module) -> bool:
    """Return whether timm builds this kind of model for an image size."""
    return hasattr(module, "patch_embed")


class TimmEncoder(nn.Module):
    """A model of timm, or `Capi`, with the interface of `VisionEncoder`; it is never trained.

    Attributes:
        module: timm's own; its state dict is in the run's file.
    """

    def __init__(self, settings: Encoder, module: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self.module = module
        self.num_prefix_tokens = settings.prefix_tokens

    def forward(
        self,
        images: Tensor,
        ids_keep: Tensor | None = None,
        *,
        blocks: Collection[int] = (),
        norm: Norm = "last",
        pooling: Pooling | None = None,
    ) -> EncoderOutput:
        """Encode images (arguments: `VisionEncoder.forward`)."""
        unknown = set(blocks) - set(range(self.settings.depth))
        if unknown:
            raise ValueError(f"no block {min(unknown)} of {self.settings.depth}")
        if ids_keep is not None:
            name = self.settings.foreign
            raise ValueError(f"{name} encodes all patches; only plain ViTs can leave some out")
        last = self.settings.depth - 1
        raw, grid = self._blocks(images, {*blocks, last})
        tokens = raw[last] if norm == "none" else self.norm(raw[last])
        requested = {}
        for number in blocks:
            x = self.norm(raw[number]) if norm == "all" else raw[number]
            requested[number] = x if pooling is None else self.pool(x, pooling)
        return EncoderOutput(tokens, requested, self.num_prefix_tokens, grid)

    def _blocks(
        self, images: Tensor, numbers: Collection[int]
    ) -> tuple[dict[int, Tensor], tuple[int, int]]:
        """Return raw tokens [b, P + L, D] of blocks by number, and rows and columns of the grid."""
        module = cast(Any, self.module)
        if not takes_size(module):  # convolutions give one map
            x = module.forward_features(images)
            return {0: x.flatten(2).transpose(1, 2)}, (int(x.shape[2]), int(x.shape[3]))
        found = module.forward_intermediates(
            images,
            sorted(numbers),
            return_prefix_tokens=self.num_prefix_tokens > 0,
            output_fmt="NLC",
            intermediates_only=True,
        )
        if self.num_prefix_tokens:
            found = [torch.cat([prefix, patches], dim=1) for patches, prefix in found]
        rows, columns = (side // self.settings.patch_size for side in images.shape[2:])
        return dict(zip(sorted(numbers), found, strict=True)), (rows, columns)

    @property
    def norm(self) -> nn.Module:
        """Return the norm after the last block; an identity if it belongs to the head."""
        return cast(nn.Module, getattr(self.module, "norm", None) or _NONE)

    def pool(self, tokens: Tensor, how: Pooling) -> Tensor:
        """Pool tokens [b, P + L, D] to [b, D].

        With "head", as timm's own head pools: by attention, or by a norm behind the mean.

        Raises:
            UserError: there is no [CLS] token to take.
        """
        if how != "head":
            return pool_tokens(self.settings, tokens, how)
        if not takes_size(self.module):  # such heads take a map
            side = math.isqrt(tokens.shape[1])
            tokens = tokens.transpose(1, 2).unflatten(2, (side, side))
        pooled = cast(Any, self.module).forward_head(tokens, pre_logits=True)
        return cast(Tensor, pooled)


_NONE = nn.Identity()


def build_foreign(settings: Encoder) -> TimmEncoder:
    """Build an encoder that is no plain ViT; UserError if this version of timm cannot."""
    if settings.module == "capi":
        return TimmEncoder(settings, Capi(settings))
    assert settings.timm is not None
    try:
        module = create_for(settings.timm, settings.image_size)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise UserError(f"timm {timm.__version__} cannot build {settings.timm}: {line}") from None
    return TimmEncoder(settings, module)


def create_for(name: str, image_size: int) -> nn.Module:
    """Build timm's model as `create` does, for an image size if its kind has one."""
    with torch.device("meta"):
        sized = takes_size(create(name))
    return create(name, **({"img_size": image_size} if sized else {}))


def fit_weights(
    module: nn.Module, checkpoint: Mapping[str, Any], where: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors of a checkpoint under the names of timm's module, in float32.

    Files with timm's names are taken as they are. Others are renamed by timm's function for the
    published files of this kind of model.

    Args:
        module: of timm, without classifier; on the meta device or not.
        checkpoint: as `read_checkpoint` returns it.
        where: file and model, for messages.

    Returns:
        One tensor for each name of the module's state dict, and counts of others by name.
    """
    expected = module.state_dict()
    found = _state_dict(checkpoint)
    if not found:
        raise UserError(f"{where}: holds no tensors; its first entries: {[*checkpoint][:5]}")
    _check_patches(found, expected, where)
    own, left_out = _without_head(found, module, expected)
    if own.keys() != expected.keys() or any(
        own[name].shape != value.shape for name, value in expected.items()
    ):
        renamed = _renamed(found, module, where)
        own, left_out = _without_head(renamed, module, expected)
    check_tensors(own, expected, where)
    return {name: own[name].float() for name in expected}, left_out


def _check_patches(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights of another patch size (UserError): timm's functions would resample them."""
    wanted = expected.get("patch_embed.proj.weight")
    if wanted is None or wanted.ndim != 4:
        return
    for name, value in found.items():
        is_embedding = value.ndim == 4 and value.shape[:2] == wanted.shape[:2]
        if is_embedding and value.shape != wanted.shape:
            sizes = value.shape[-1], wanted.shape[-1]
            raise UserError(f"{where}: {name} is of patches of {sizes[0]} pixels, not {sizes[1]}")


def check_tensors(
    tensors: Mapping[str, Any], expected: Mapping[str, Tensor], where: str, prefix: str = ""
) -> None:
    """Raise UserError for other names, kinds or shapes, and for values that are not finite."""
    for name, value in tensors.items():
        if name not in expected:
            raise UserError(f"{where}: unexpected {name}")
        real = isinstance(value, Tensor) and value.is_floating_point()
        if not real and (not isinstance(value, Tensor) or expected[name].is_floating_point()):
            raise UserError(f"{where}: {prefix}{name} is no tensor of real numbers")
        found, wanted = list(value.shape), list(expected[name].shape)
        if found != wanted:
            raise UserError(f"{where}: {prefix}{name} is {found} and should be {wanted}")
        if value.is_meta or not value.float().isfinite().all():
            raise UserError(
                f"{where}: {prefix}{name} has values that are missing or not finite; fetch it again"
            )
    missing = next((name for name in expected if name not in tensors), None)
    if missing is not None:
        raise UserError(f"{where}: {prefix}{missing} is missing")


_ENTRIES = ("state_dict", "model", "teacher")


def stored_grid(checkpoint: Mapping[str, Any], usual: int, where: str) -> int:
    """Return the rows of patches of the positions in a plain ViT's file; `usual` without any.

    Raises:
        UserError: the positions are no square.
    """
    positions = _state_dict(checkpoint).get("pos_embed")
    if positions is None or positions.ndim != 3:
        return usual
    rows = math.isqrt(positions.shape[1])
    if positions.shape[1] - rows**2 > 1:  # [CLS] has one more
        raise UserError(
            f"{where}: pos_embed is {list(positions.shape)}, which is no square of patches, with "
            "or without [CLS]; import weights of square images"
        )
    return rows


def _state_dict(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint: at its top, or in the entry that training codes use."""
    for entry in _ENTRIES:
        if isinstance(checkpoint.get(entry), Mapping):
            checkpoint = checkpoint[entry]
            break
    tensors = {str(k): v for k, v in checkpoint.items() if isinstance(v, Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors


def _without_head(
    tensors: Mapping[str, Tensor], module: nn.Module, expected: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return tensors without those of a classifier, and counts of the latter by name."""
    given = cast(Any, module).pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((given,) if isinstance(given, str) else given))
    left_out: dict[str, int] = {}
    own = {}
    for name, value in tensors.items():
        head = next((h for h in heads if name.startswith(h)), None)
        if head is None or name in expected:
            own[name] = value
        else:
            left_out[f"{head}*"] = left_out.get(f"{head}*", 0) + 1
    return own, left_out


def _renamed(tensors: dict[str, Tensor], module: nn.Module, where: str) -> dict[str, Tensor]:
    """Return the tensors of a published file as timm's own function converts them."""
    convert = getattr(import_module(type(module).__module__), "checkpoint_filter_fn", None)
    if convert is None:
        return tensors
    try:
        converted = convert(dict(tensors), module)
    except (KeyError, RuntimeError, ValueError, AttributeError, IndexError) as error:
        line = " ".join(str(error).split())[:120]
        raise UserError(f"{where}: not a published file of this model ({line})") from None
    return {str(k): v for k, v in converted.items() if isinstance(v, Tensor)}
