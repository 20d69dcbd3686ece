"""Joining the other ranks, on GPUs through NCCL or on CPUs through gloo."""

import ctypes
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist

# The last resort: before it, the watchdog ends a stalled step and says which rank is missing.
TIMEOUT = timedelta(minutes=30)


class Context(Protocol):
    """What a launched function is given (`maect.launch`)."""

    rank: int
    local_rank: int
    world_size: int
    cpus: int

    def stop_requested(self) -> bool:
        """Whether this rank was told to save and return."""

    def report(self, progress: dict[str, Any]) -> None:
        """Show how far the run is."""

    def fail(self, error: BaseException) -> None:
        """End this rank at once with an error, from beside a main thread that is stuck."""


def start(context: Context) -> torch.device:
    """Join the process group; MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are in the environment.

    Returns:
        The device of this rank.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32, in the patch embedding too
    else:
        device = torch.device("cpu")
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        torch.set_num_threads(max(1, context.cpus))
        if sys.platform == "linux":
            _keep_freed_memory()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, rank=context.rank, world_size=context.world_size, timeout=TIMEOUT
        )
    import deepspeed

    # An optimizer that is not ours compiles itself there, which imports the compiler: seconds.
    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # None of its C++ operators is used. To look which ones there are takes a second, and to
    # compile its shared-memory collectives a minute and a compiler.
    deepspeed.ops.__compatible_ops__ = {}
    # The name that torch 2.11 to 2.14 share, for what later versions rename.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor")
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    return device


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees: pages that the kernel clears anew cost an eighth of it."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, 2**31 - 1)


def summed(values: Sequence[float | torch.Tensor], device: torch.device) -> list[float]:
    """Sums of scalars over the ranks, in float64, as Python floats."""
    parts = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
    total = torch.stack([part.detach().reshape(()) for part in parts])
    dist.all_reduce(total)
    return [float(v) for v in total.tolist()]


def from_rank_0(value: Any) -> Any:
    """Rank 0's value of a small Python object, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
