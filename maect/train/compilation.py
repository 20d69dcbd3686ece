"""Transformer blocks compiled by PyTorch's compiler, one by one."""

from typing import Any, cast

import torch
from timm.models.vision_transformer import Block
from torch import nn

from maect.core.distributed import any_rank
from maect.core.processes import private_caches
from maect.recipes.computing import Computing
from maect.train.stage import Training

GRAPHS = 32
"""Compiled forms of a transformer block, at most."""
WIDE = 768
"""Values of a token, from which blocks are compiled by default."""


def is_to_be_compiled(
    module: nn.Module, settings: Training, device: torch.device, computing: Computing
) -> bool:
    """Return whether to compile the blocks: as asked, or by default (`Computing.compile`)."""
    if computing.compile is not None:
        return computing.compile
    widths = (cast(Any, block).attn.qkv.in_features for block in _blocks(module))
    wide: bool = max(widths, default=0) >= WIDE
    whole = computing.zero_stage < 3  # DeepSpeed gathers the parameters of a layer in hooks
    return device.type == "cuda" and wide and whole and not settings.labelled


def compile_blocks(module: nn.Module, device: torch.device) -> str:
    """Compile the transformer blocks on every rank, or on none; return why not."""
    if not (blocks := _blocks(module)):
        return "it has no blocks with their norms in front"
    private_caches()
    # All blocks of a process share these: sizes of views, learning and frozen ones, online
    # evaluations, and their last batches. Beyond PyTorch's 8, blocks would run uncompiled
    # without a warning.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    reason = ""
    try:
        torch.compile(torch.nn.functional.gelu)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: the compiler has many kinds of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if any_rank(bool(reason)):
        return reason or "another rank cannot"
    for block in blocks:
        # Encoder and decoder share the code of a block: each gets one for its own shapes.
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return ""


def _blocks(module: nn.Module) -> list[Block]:
    """Return what can be compiled: all blocks but data2vec's, with norms behind the sums."""
    return [part for part in module.modules() if isinstance(part, Block)]
