"""MAE's decoder, and the reconstruction loss on masked patches (He et al. 2022)."""

from functools import partial

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from maect.models.kernels import use_attention
from maect.models.vit import initialize, run_block, sincos_2d, take_tokens
from maect.recipes import Encoder


class Decoder(nn.Module):
    """Predicts the pixels of every patch from the tokens of the visible ones.

    Parameter names are those of the published MAE checkpoints without their `decoder_` prefix.

    Attributes:
        checkpointing: recompute the blocks in the backward pass instead of storing them.
    """

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        width = settings.decoder_width
        self.registers = settings.registers
        self.checkpointing = False
        self.embed = nn.Linear(settings.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        grid = settings.image_size // settings.patch_size
        self.register_buffer("pos_embed", sincos_2d(width, grid, 1), persistent=False)
        self.pos_embed: Tensor
        self.blocks = nn.ModuleList(
            Block(
                width,
                settings.decoder_heads,
                qkv_bias=True,
                norm_layer=partial(nn.LayerNorm, eps=1e-6),  # type: ignore[arg-type]
            )
            for _ in range(settings.decoder_depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pred = nn.Linear(width, settings.patch_size**2 * settings.pixels.channels)
        use_attention(self, "sdpa")
        initialize(self)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, tokens: Tensor, ids_shuffle: Tensor) -> Tensor:
        """Predict the pixels of all patches; registers are left out.

        Args:
            tokens: encoded [CLS], registers and visible patches, [b, 1 + R + K, D].
            ids_shuffle: patch numbers, int64 [b, L], the K visible ones first, as encoded.

        Returns:
            Pixels [b, L, p * p * C], patch by patch in raster order.
        """
        if self.registers:
            tokens = torch.cat([tokens[:, :1], tokens[:, 1 + self.registers :]], dim=1)
        cls, visible = self.embed(tokens).tensor_split([1], dim=1)
        hidden = ids_shuffle.shape[1] - visible.shape[1]
        mask = self.mask_token.to(visible.dtype).expand(len(visible), hidden, -1)
        (patches,) = take_tokens(ids_shuffle.argsort(dim=1), torch.cat([visible, mask], dim=1))
        x = torch.cat([cls, patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = run_block(block, x, self.checkpointing)
        return self.pred(self.norm(x))[:, 1:]


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images [b, C, S, S] into raster-ordered patches [b, L, p * p * C], channels last."""
    b, c, size, _ = images.shape
    grid = size // patch_size
    x = images.reshape(b, c, grid, patch_size, grid, patch_size)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, grid * grid, patch_size**2 * c)


def unpatchify(patches: Tensor, patch_size: int) -> Tensor:
    """Return the images [b, C, S, S] whose patches are [b, L, p * p * C]: undo `patchify`."""
    b, count, _ = patches.shape
    grid = round(count**0.5)
    x = patches.reshape(b, grid, grid, patch_size, patch_size, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(b, -1, grid * patch_size, grid * patch_size)


def reconstruction_loss(
    prediction: Tensor, images: Tensor, ids_shuffle: Tensor, visible: int, normalize: bool
) -> Tensor:
    """Return the mean squared error on the masked patches, in at least float32.

    Args:
        prediction: [b, L, p * p * C].
        images: normalized, [b, C, S, S].
        ids_shuffle: patch numbers [b, L], the visible ones first.
        visible: number of visible patches.
        normalize: compare with each patch's pixels after removing their mean and dividing by
            their (unbiased) standard deviation: MAE's "normalized pixels".

    Returns:
        Loss [], a mean over the pixels of a patch, then over the masked patches.
    """
    exact = torch.promote_types(prediction.dtype, torch.float32)
    patch_size = round((prediction.shape[2] / images.shape[1]) ** 0.5)
    target = patchify(images.to(exact), patch_size)
    target, prediction = take_tokens(ids_shuffle[:, visible:], target, prediction.to(exact))
    if normalize:
        variance, mean = torch.var_mean(target, dim=2, keepdim=True)
        target = (target - mean) / (variance + 1e-6).sqrt()
    return (prediction - target).square().mean()
