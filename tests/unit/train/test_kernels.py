"""Ranks compute with the kernels that the environment asks for."""

import os

import torch
from ranks import run


def kernels(context):
    return torch.backends.cpu.get_cpu_capability()


def test_ranks_compute_with_the_kernels_that_are_asked_for(tmp_path):
    asked = os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability())
    assert run(1, {"function": kernels}, log=tmp_path / "log") == [asked.upper()]
