"""Faster passes: transformer blocks compiled one by one, and passes captured as CUDA graphs.

A step of a small encoder takes a GPU less time than its host needs to launch the kernels one by
one. What is captured computes the same with the same kernels (torch.cuda.make_graphed_callables).
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from maect.core.distributed import any_rank
from maect.core.owners import private_caches
from maect.recipes.settings import Computing

Tensors = tuple[Tensor, ...]
Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
MOST_COMPILED_FORMS = 32
"""Compiled forms of a transformer block, at most."""
COMPILED_WIDTH = 768
"""Values of a token, from which blocks are compiled by default."""


# ---- compiled blocks


def is_to_be_compiled(
    module: nn.Module, labelled: bool, device: torch.device, computing: Computing
) -> bool:
    """Return whether to compile the blocks: as asked, or by default (`Computing.compile`).

    Args:
        module: with transformer blocks.
        labelled: whether the stage learns from labels, where it does not pay by default.
        device: that computes.
        computing: what was asked for.
    """
    if computing.compile is not None:
        return computing.compile
    widths = [cast(Any, block).attn.qkv.in_features for block in _blocks(module)]
    is_wide: bool = max(widths, default=0) >= COMPILED_WIDTH
    # Under ZeRO 3 DeepSpeed gathers the parameters of a layer in hooks.
    is_whole = computing.zero_stage < 3
    return device.type == "cuda" and is_wide and is_whole and not labelled


def compile_blocks(module: nn.Module, device: torch.device) -> str:
    """Compile the transformer blocks on every rank, or on none.

    Returns:
        Why they are not compiled; empty if they are.
    """
    blocks = _blocks(module)
    if not blocks:
        return "it has no blocks with their norms in front"
    private_caches()
    # All blocks of a process share these: sizes of views, learning and frozen ones, online
    # evaluations, and their last batches. Beyond PyTorch's 8, blocks would run uncompiled
    # without a warning.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_COMPILED_FORMS)
    fault = ""
    try:
        torch.compile(torch.nn.functional.gelu)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: the compiler has many kinds of errors
        fault = str(error).strip().partition("\n")[0] or type(error).__name__
    if any_rank(bool(fault)):
        return fault or "another rank cannot"
    for block in blocks:
        # Encoder and decoder share the code of a block: each gets one for its own shapes.
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return ""


def _blocks(module: nn.Module) -> list[Block]:
    """Return the blocks that can be compiled: not data2vec's, with norms after the sums."""
    return [part for part in module.modules() if isinstance(part, Block)]


# ---- captured passes


class Passes:
    """The part of an objective whose kernels have fixed shapes, and that waits for no other rank.

    Calls a function of tensors, or replays what was captured for tensors of these shapes.
    """

    def __init__(self, function: Callable[..., Tensors], parts: Iterable[nn.Module]) -> None:
        """Prepare a function; nothing is captured yet.

        Args:
            function: from tensors to tensors; reads no parameters but those of `parts`, draws
                nothing, and changes no buffer.
            parts: modules whose parameters it reads.
        """
        self._function = function
        self._parts = list(parts)
        self._captured: dict[Shapes, nn.Module] = {}

    def __call__(self, *tensors: Tensor) -> Tensors:
        """Compute, or replay the capture for tensors of these shapes."""
        captured = self._captured.get(_shapes(tensors)) if self._captured else None
        outputs: Tensors = (captured or self._function)(*tensors)
        return outputs

    def capture(self, *tensors: Tensor) -> None:
        """Capture forward and backward pass for tensors of these shapes; takes four passes.

        Outputs and gradients of a replay lie where those of the replay before it lay: they have to
        be read, and the parameters' `grad` set to None, before the next forward pass.
        """
        if _shapes(tensors) in self._captured:
            return
        samples = tuple(tensor.detach().clone() for tensor in tensors)
        module = _Callable(self._function, self._parts)
        torch.cuda.make_graphed_callables(module, samples, allow_unused_input=True)
        self._captured[_shapes(tensors)] = module

    def release(self) -> None:
        """Let go of the captures and of their memory."""
        self._captured.clear()


def is_to_be_captured(module: nn.Module, device: torch.device, computing: Computing) -> bool:
    """Return whether to capture the passes: on one GPU, and as `computing` says.

    DeepSpeed keeps autograd's nodes of the parameters that it partitions over several ranks; they
    belong to another stream than the capture's.
    """
    is_only_rank = not dist.is_initialized() or dist.get_world_size() == 1
    has_passes = isinstance(getattr(module, "passes", None), Passes)
    return device.type == "cuda" and has_passes and is_only_rank and computing.captures_passes


class _Callable(nn.Module):
    """A function as a module with the parameters that it reads, as PyTorch captures it."""

    def __init__(self, function: Callable[..., Tensors], parts: list[nn.Module]) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> Tensors:
        return self.function(*tensors)


def _shapes(tensors: Tensors) -> Shapes:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)
