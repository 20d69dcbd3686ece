"""Floating-point operations of a training step, counted from its settings; no torch needed."""

from maect.recipes import Encoder, visible_patches
from maect.recipes.flops import block_flops, decoder_flops, head_flops
from maect.stages import Head, Pretrain, Stage, Tune


def flops_per_image(stage: Stage, encoder: Encoder) -> float:
    """Operations of one training step, forward and backward over all views, per image."""
    patches = encoder.patches
    tokens = int(encoder.class_token) + visible_patches(patches, stage.mask_ratio)
    pixels = 3 * encoder.patch_size**2
    head = getattr(stage, "head", None)
    embed = 2 * patches * pixels * encoder.width
    blocks = encoder.depth * block_flops(tokens, encoder.width)
    frozen = encoder.depth if isinstance(stage, Head) else getattr(stage, "frozen_blocks", 0)
    trained = 1 - frozen / encoder.depth
    # The pixels need no gradient: one product in the backward pass, not two.
    view = (1 if frozen else 2) * embed + (1 + 2 * trained) * blocks
    if isinstance(stage, Pretrain):
        view += 3 * decoder_flops(encoder, tokens)
    if head is not None:
        reached = isinstance(stage, Tune) or getattr(stage, "contrastive", "") == "combined"
        view += head_flops(head, encoder.width, stage.batch_size, reached)
    return stage.views * view
