"""Collectives that gradients pass through. Without a process group they do nothing."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather_rows(x: Tensor) -> Tensor:
    """Rows of all ranks in rank order, [b, ...] to [world * b, ...].

    In the backward pass the gradients that the ranks have for a row are summed: with each rank's
    loss a mean over its own rows, averaging the parameters' gradients over the ranks then gives
    the gradient of the global mean.
    """
    if rank_and_size()[1] == 1:
        return x
    return _GatherRows.apply(x)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _, size = rank_and_size()
        out = x.new_empty(size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        rank, size = rank_and_size()
        return gradient.chunk(size)[rank]
