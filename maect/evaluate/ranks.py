"""The process group of an evaluation, and the few exchanges it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import from_rank_0, join

# A rank may wait for another one that works on its share for hours.
_PATIENCE = timedelta(hours=12)


def device_of(context: Context) -> torch.device:
    """This rank's GPU, or the CPU; full float32 precision on both."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(context: Context) -> Iterator[None]:
    """Join the other ranks, from the environment that the launcher has set."""
    if context.world_size == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    join(context, backend, _PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_of(context: Context, n: int, batch: int) -> range:
    """This rank's rows of n: whole batches, so that every world size has the same ones."""
    share = -(-n // (context.world_size * batch)) * batch
    return range(min(n, share * context.rank), min(n, share * (context.rank + 1)))


def barrier(context: Context) -> None:
    """Wait for all ranks."""
    any_rank(context, False)


def any_rank(context: Context, flag: bool) -> bool:
    """Whether any rank says so."""
    if context.world_size == 1:
        return flag
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


def from_first(context: Context, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if context.world_size == 1:
        return value
    return from_rank_0(value)


def gather_rows(context: Context, rows: Tensor) -> Tensor:
    """Rows of all ranks in rank order; every rank brings equally many."""
    if context.world_size == 1:
        return rows
    out = rows.new_empty(context.world_size * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous())
    return out


def sum_ranks(context: Context, values: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if context.world_size > 1:
        dist.all_reduce(values)
    return values
