"""The vision transformer: timm's blocks and names, with masking and frozen lower blocks."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer, global_pool_nlc
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maect.core.errors import UserError
from maect.models.kernels import use_attention
from maect.recipes import Encoder

Pooling = Literal["cls", "mean", "mean_cls", "fc_norm", "head"]
"""Pooling of tokens into one vector. `cls`: the [CLS] token. `mean`: the mean of the patch tokens.
`mean_cls`: the mean of all tokens before them, if there are several [CLS] tokens. `fc_norm`: the
final norm of the mean of the patch tokens. `head`: as the head of timm's model pools."""
Norm = Literal["last", "none", "all"]
"""Blocks whose output the final norm is applied to: the last one, none, or all."""


class EncoderOutput(NamedTuple):
    """Output of an encoder. Tokens are [CLS] if there is one, registers, then patches.

    Attributes:
        tokens: of the last block, [b, P + K, D].
        blocks: output of each requested block, by its number from 0: tokens [b, P + K, D], or
            vectors [b, D] if pooling was requested.
        prefixes: number P of tokens before the patches.
        grid: rows and columns of the images' L patches, of which K were encoded.
    """

    tokens: Tensor
    blocks: dict[int, Tensor]
    prefixes: int
    grid: tuple[int, int]

    def prefix_tokens(self, block: int | None = None) -> Tensor:
        """Return [CLS] and registers of a block, by default the last one, [b, P, D]."""
        return self._of(block)[:, : self.prefixes]

    def patch_tokens(self, block: int | None = None) -> Tensor:
        """Return the patch tokens of a block, by default the last one, row by row, [b, K, D]."""
        return self._of(block)[:, self.prefixes :]

    def _of(self, block: int | None) -> Tensor:
        return self.tokens if block is None else self.blocks[block]


class PostNormBlock(ResPostBlock):
    """timm's block with each norm after the sum, as in data2vec: x = norm(x + attn(x))."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute the block on tokens [b, N, D]."""
        x = self.norm1(x + self.drop_path1(self.attn(x)))
        return self.norm2(x + self.drop_path2(self.mlp(x)))


class VisionEncoder(VisionTransformer):
    """timm's `VisionTransformer` without a classifier; its state dict is timm's.

    With `norm: post` in the settings (data2vec 2.0) a norm stands behind the embedding and behind
    each sum of a block, and there is no final norm.

    Attributes:
        frozen_blocks: number of first blocks that run without gradients, as does the embedding.
        checkpointing: recompute the trainable blocks in the backward pass instead of storing them.
    """

    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    pos_embed: Tensor  # type: ignore[assignment]

    def __init__(self, settings: Encoder) -> None:
        post_norm = settings.norm == "post"
        super().__init__(
            **timm_arguments(settings, "mean"),  # any: `pool` is told how
            num_classes=0,
            pre_norm=post_norm,  # timm's name for a norm behind the embedding
            final_norm=not post_norm,
            block_fn=PostNormBlock if post_norm else Block,
        )
        if post_norm:  # timm leaves out the bias before a norm
            self.patch_embed.proj.bias = nn.Parameter(torch.zeros(settings.width))
        self.settings = settings
        self.frozen_blocks = 0
        self.checkpointing = False
        self._resampled: dict[tuple[int, int], Tensor] = {}
        del self.pos_embed  # learnt in timm, fixed here: a buffer is neither trained nor sharded
        grid = settings.image_size // settings.patch_size
        self.register_buffer("pos_embed", sincos_2d(settings.width, grid, self.num_prefix_tokens))
        use_attention(self, "sdpa")
        initialize(self)
        patch = self.patch_embed.proj.weight
        nn.init.xavier_uniform_(patch.data.view(patch.shape[0], -1))
        for token in self._prefix():
            nn.init.normal_(token, std=0.02)

    def _prefix(self) -> list[Tensor]:
        """Return [CLS] [1, 1, D] and registers [1, R, D], if there are any."""
        return [token for token in (self.cls_token, self.reg_token) if token is not None]

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        ids_keep: Tensor | None = None,
        *,
        blocks: Collection[int] = (),
        norm: Norm = "last",
        pooling: Pooling | None = None,
    ) -> EncoderOutput:
        """Encode images of any height and width that patches tile.

        Args:
            images: float [b, C, H, W], normalized.
            ids_keep: patches to encode, int64 [b, K]; all L of them if None.
            blocks: numbers, from 0, of the blocks whose output to return, too.
            norm: blocks whose output the final norm is applied to. The output of `blocks` is the
                raw one, also of the last block, unless this is "all".
            pooling: of the output of `blocks`; None: tokens, which fill the memory if there are
                many blocks.

        Raises:
            ValueError: images that patches do not tile, or no such block.
        """
        unknown = set(blocks) - set(range(len(self.blocks)))
        if unknown:
            raise ValueError(f"no block {min(unknown)} of {len(self.blocks)}")
        height, width = images.shape[2:]
        patch = self.settings.patch_size
        if height % patch or width % patch:
            raise ValueError(f"images of {height} x {width} pixels: patches have {patch}")
        grid = height // patch, width // patch
        requested: dict[int, Tensor] = {}

        def collect(number: int, x: Tensor) -> None:
            if number in blocks:
                x = self.norm(x) if norm == "all" else x
                requested[number] = x if pooling is None else self.pool(x, pooling)

        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_blocks):
            x = embed_patches(self.patch_embed, images)
            positions = self.positions(*grid)
            x = x + positions[:, self.num_prefix_tokens :]
            if ids_keep is not None:
                (x,) = take_tokens(ids_keep, x)
            if self.num_prefix_tokens:
                tokens = self._prefix()
                prefix = torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0]
                prefix = prefix + positions[:, : self.num_prefix_tokens]
                x = torch.cat([prefix.expand(len(x), -1, -1), x], dim=1)
            x = self.norm_pre(x)
            for number in range(self.frozen_blocks):
                x = self.blocks[number](x)
                collect(number, x)
        for number in range(self.frozen_blocks, len(self.blocks)):
            x = run_block(self.blocks[number], x, self.checkpointing)
            collect(number, x)
        x = x if norm == "none" else self.norm(x)
        return EncoderOutput(x, requested, self.num_prefix_tokens, grid)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the position table of a grid, [1, P + rows * columns, D].

        For another grid than the encoder's own it is interpolated once: bicubic, without
        antialiasing, in float32 on the CPU, so that every device has the same table.
        """
        side = self.settings.image_size // self.settings.patch_size
        if rows == columns == side:
            return self.pos_embed
        if (rows, columns) not in self._resampled:
            with torch.inference_mode(False), torch.no_grad():
                own = self.pos_embed.detach().float().cpu().clone()
                table = resample_abs_pos_embed(
                    own, [rows, columns], [side, side], self.num_prefix_tokens, antialias=False
                )
                self._resampled[rows, columns] = table.to(self.pos_embed)
        return self._resampled[rows, columns]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "VisionEncoder":
        self._resampled.clear()  # to another device or type
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._resampled.clear()  # the positions change
        super()._load_from_state_dict(*args)

    def pool(self, tokens: Tensor, how: Pooling) -> Tensor:  # type: ignore[override]
        """Pool tokens of any block, [b, P + K, D], to [b, D].

        Raises:
            UserError: there is no [CLS] token to take.
        """
        pooled = pool_tokens(self.settings, tokens, how)
        return self.fc_norm(pooled) if how == "fc_norm" else pooled

    def norm_after_pooling(self) -> None:
        """Move the final norm after the pooling of patches, as MAE's fine-tuning does."""
        self.fc_norm = nn.LayerNorm(self.settings.width, eps=1e-6)
        self.norm = nn.Identity()

    def freeze(self, blocks: int) -> None:
        """Freeze the lowest blocks and all before them: embedding, [CLS], registers (the paper)."""
        self.frozen_blocks = blocks
        if blocks:
            for part in [self.patch_embed, self.norm_pre, *self.blocks[:blocks]]:
                part.requires_grad_(False).eval()
        for token in self._prefix():
            token.requires_grad_(not blocks)


def timm_arguments(encoder: Encoder, pooling: str) -> dict[str, Any]:
    """Return arguments with which timm's `VisionTransformer` computes our feature vector."""
    arguments = {
        "img_size": encoder.image_size,
        "patch_size": encoder.patch_size,
        "in_chans": encoder.pixels.channels,
        "embed_dim": encoder.width,
        "depth": encoder.depth,
        "num_heads": encoder.heads,
        "class_token": encoder.class_token,
        "reg_tokens": encoder.registers,
        "global_pool": "token" if pooling == "cls" else "avg",
        # Only fine-tuned encoders take the norm of the mean, the others the mean of normed patches.
        "fc_norm": pooling == "fc_norm",
    }
    timm_defaults = {"in_chans": 3, "reg_tokens": 0}
    return {key: value for key, value in arguments.items() if timm_defaults.get(key) != value}


def build_encoder(settings: Encoder) -> VisionEncoder:
    """Build an encoder, initialised from torch's global generator (see `seeded`)."""
    return VisionEncoder(settings)


def pool_tokens(encoder: Encoder, tokens: Tensor, how: Pooling) -> Tensor:
    """Pool tokens [b, P + K, D] to [b, D]: by "cls" (UserError without one), "mean_cls" or mean."""
    if how == "cls" and not encoder.class_token:
        raise UserError("this encoder has no [CLS] token: pool the mean of its patches")
    if how == "mean_cls":
        return tokens[:, : encoder.prefix_tokens].mean(dim=1)
    return global_pool_nlc(tokens, "token" if how == "cls" else "avg", encoder.prefix_tokens)


def run_block(block: nn.Module, x: Tensor, checkpointing: bool) -> Tensor:
    """Compute a block on tokens [b, N, D]; `checkpointing` recomputes it in the backward pass."""
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, x, use_reentrant=False)
    return block(x)


def embed_patches(embed: PatchEmbed, images: Tensor) -> Tensor:
    """Compute timm's patch embedding as a matrix product, [b, C, H, W] to [b, L, D].

    A convolution's gradient need not be the same in every run: cuDNN may sum atomically, and
    oneDNN's kernel for AVX2 has hung in the barrier between its threads.
    """
    b, c, height, width = images.shape
    p = embed.proj.kernel_size[0]
    x = images.reshape(b, c, height // p, p, width // p, p)
    x = x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)  # channels first, as its weights
    return F.linear(x, embed.proj.weight.flatten(1), embed.proj.bias)


def take_tokens(ids: Tensor, *tokens: Tensor) -> list[Tensor]:
    """Take the tokens numbered `ids`, int64 [b, K], from each of `tokens`, [b, N, D]: [b, K, D].

    By whole rows: `gather` would read an index for every value, and take twice as long on a CPU.
    """
    b, n = tokens[0].shape[:2]
    rows = (ids + torch.arange(0, b * n, n, device=ids.device)[:, None]).flatten()
    return [x.reshape(b * n, -1).index_select(0, rows).view(*ids.shape, -1) for x in tokens]


def initialize(module: nn.Module) -> None:
    """Initialise linear layers as MAE does: Xavier-uniform weights, zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial values from `seed` on the CPU, and restore the generator at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


def sincos_2d(width: int, grid: int, prefix: int = 0) -> Tensor:
    """Return the sine-cosine embedding of the cells of a square grid, row by row.

    The first half of the channels encodes the column and the second half the row, each as sines
    followed by cosines of `position / 10000^(i / (width / 4))`.

    Args:
        width: channels, a multiple of 4.
        grid: rows and columns of the grid.
        prefix: rows of zeros before the cells, for tokens that are no patches.

    Returns:
        float32 [1, prefix + grid * grid, width], computed in float64.
    """
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(grid, dtype=torch.float64)[:, None] * frequency
    line = torch.cat([angle.sin(), angle.cos()], dim=1)
    columns = line[None, :, :].expand(grid, grid, -1)
    rows = line[:, None, :].expand(grid, grid, -1)
    table = torch.cat([columns, rows], dim=2).reshape(1, grid * grid, width).float()
    return F.pad(table, (0, 0, prefix, 0))
