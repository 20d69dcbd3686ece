"""Joining the other ranks, on GPUs through NCCL or on CPUs through gloo."""

import importlib
import logging
import os
import warnings
from unittest.mock import patch

import torch

from maect.core.context import Context
from maect.core.distributed import STEP_TIMEOUT, device_of, join, keep_freed_memory


def start(context: Context) -> torch.device:
    """Join the process group; MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are in the environment.

    Returns:
        The device of this rank.
    """
    device = device_of(context)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        keep_freed_memory()
    join(context, "nccl" if device.type == "cuda" else "gloo", STEP_TIMEOUT)
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
