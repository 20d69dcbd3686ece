"""Passes of fixed shapes, captured once as CUDA graphs: the host launches two of them a step.

A step of a small encoder takes a GPU less time than its host needs to launch the kernels one by
one. What is captured computes the same with the same kernels (torch.cuda.make_graphed_callables).
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maect.recipes.computing import Computing

Tensors = tuple[Tensor, ...]
Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


class Passes:
    """The part of an objective whose kernels have fixed shapes, and that waits for no other rank.

    Without a capture for the shapes it is given, it calls the function.
    """

    def __init__(self, function: Callable[..., Tensors], parts: Iterable[nn.Module]) -> None:
        """Prepare a function of tensors; nothing is captured yet.

        Args:
            function: from tensors to tensors; reads no parameters but those of `parts`, draws
                nothing, and changes no buffer.
            parts: modules whose parameters it reads.
        """
        self._function, self._parts = function, list(parts)
        self._captured: dict[Shapes, nn.Module] = {}

    def __call__(self, *tensors: Tensor) -> Tensors:
        """Compute, or replay what was captured for tensors of these shapes."""
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
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    on_gpu = device.type == "cuda" and isinstance(getattr(module, "passes", None), Passes)
    return on_gpu and alone and computing.captures_passes


class _Callable(nn.Module):
    """A function as a module with the parameters that it reads, as PyTorch captures it."""

    def __init__(self, function: Callable[..., Tensors], parts: list[nn.Module]) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> Tensors:
        return self.function(*tensors)


def _shapes(tensors: Tensors) -> Shapes:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)
