"""The vision transformer: timm's blocks and names, with masking and frozen lower blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maect.core.errors import UserError
from maect.models.attention import use_attention
from maect.models.positions import sincos_2d, with_cls
from maect.recipes import Encoder


class VisionEncoder(VisionTransformer):
    """timm's `VisionTransformer` without a classifier; its state dict is timm's.

    Attributes:
        frozen_blocks: so many blocks, and what comes before them, run without gradients.
        checkpointing: recompute the trainable blocks in the backward pass instead of storing them.
    """

    cls_token: nn.Parameter | None
    pos_embed: Tensor  # type: ignore[assignment]

    def __init__(self, settings: Encoder) -> None:
        super().__init__(
            img_size=settings.image_size,
            patch_size=settings.patch_size,
            embed_dim=settings.width,
            depth=settings.depth,
            num_heads=settings.heads,
            num_classes=0,
            class_token=settings.class_token,
            global_pool="token" if settings.class_token else "avg",
            fc_norm=False,
        )
        self.settings = settings
        self.frozen_blocks = 0
        self.checkpointing = False
        del self.pos_embed  # learnt in timm, fixed here: a buffer is neither trained nor sharded
        grid = settings.image_size // settings.patch_size
        positions = sincos_2d(settings.width, grid)
        positions = with_cls(positions) if settings.class_token else positions[None]
        self.register_buffer("pos_embed", positions)
        use_attention(self, "sdpa")
        initialize(self)
        patch = self.patch_embed.proj.weight
        nn.init.xavier_uniform_(patch.data.view(patch.shape[0], -1))
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=0.02)

    def forward(  # type: ignore[override]
        self, images: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """Encode images.

        Args:
            images: float [b, 3, S, S], normalized.
            kept: patches to encode, int64 [b, K]; all L of them if None.

        Returns:
            The [CLS] token and the patch tokens after the final norm, [b, 1 + K, D]; [b, K, D]
            of an encoder without a [CLS] token.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_blocks):
            x = embed_patches(self.patch_embed, images)
            x = x + self.pos_embed[:, self.num_prefix_tokens :]
            if kept is not None:
                x = x.gather(1, kept[:, :, None].expand(-1, -1, x.shape[2]))
            if self.cls_token is not None:
                cls = self.cls_token + self.pos_embed[:, :1]
                x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)
            for block in self.blocks[: self.frozen_blocks]:
                x = block(x)
        for block in self.blocks[self.frozen_blocks :]:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)

    def freeze(self, blocks: int) -> None:
        """Freeze the lowest blocks with patch embedding and [CLS] token (protocol of the paper)."""
        self.frozen_blocks = blocks
        for part in [self.patch_embed, *self.blocks[:blocks]] if blocks else []:
            part.requires_grad_(False).eval()
        if self.cls_token is not None:
            self.cls_token.requires_grad_(not blocks)


def embed_patches(embed: PatchEmbed, images: Tensor) -> Tensor:
    """timm's patch embedding as a matrix product, [b, 3, S, S] to [b, L, D].

    A convolution's gradient need not be the same in every run: cuDNN may sum atomically, and
    oneDNN's kernel for AVX2 has hung in the barrier between its threads.
    """
    b, c, height, width = images.shape
    p = embed.proj.kernel_size[0]
    x = images.reshape(b, c, height // p, p, width // p, p)
    x = x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)  # channels first, as its weights
    return F.linear(x, embed.proj.weight.flatten(1), embed.proj.bias)


def build_encoder(settings: Encoder) -> VisionEncoder:
    """An encoder of the given shape, initialised from torch's global generator (see `seeded`)."""
    return VisionEncoder(settings)


def pool(tokens: Tensor, how: Literal["cls", "mean"], class_token: bool = True) -> Tensor:
    """One vector per image: the [CLS] token, or the mean of the patch tokens.

    Args:
        tokens: [b, 1 + L, D], after the final norm; [b, L, D] without a [CLS] token.
        how: "cls" or "mean".
        class_token: whether there is a [CLS] token (`Encoder.class_token`).

    Returns:
        [b, D].

    Raises:
        UserError: "cls" is asked for and there is none.
    """
    if how == "mean":
        return tokens[:, int(class_token) :].mean(dim=1)
    if not class_token:
        raise UserError("this encoder has no [CLS] token: pool the mean of its patches")
    return tokens[:, 0]


def initialize(module: nn.Module) -> None:
    """MAE's initialisation of linear layers: Xavier-uniform weights, zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial values from `seed` on the CPU, whatever was drawn before, and leave no trace."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield
