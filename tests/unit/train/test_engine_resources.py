"""What an engine takes: process groups with their time limits, memory, waits for the device."""

import gc
import math
import time
import weakref
from datetime import timedelta

import pytest
import torch
from ranks import run
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from maect.recipes.cost import FLOAT, Footprint
from maect.recipes.settings import Computing
from maect.stages import load_recipe
from maect.train import engine

CPU = torch.device("cpu")
LIMIT = timedelta(minutes=17)  # no backend's own
WIDTH = 512
NEAR = 1.1
KEPT = 4 * WIDTH - 1
"""Bytes that may be left: less than a bias."""


def build(zero_stage: int) -> engine.Engine:
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, WIDTH)
    settings = load_recipe("mae", "base", {"batch_size": 2})
    how = Computing(zero_stage=zero_stage)
    group = {"params": list(layer.parameters()), "peak_lr": 1e-3, "weight_decay": 0.0}
    return engine.Engine(layer, settings, [group], CPU, how)


def step(trained: engine.Engine) -> engine.Engine:
    trained.backward(trained(torch.ones(1, WIDTH)).sum())
    trained.step(1.0)
    return trained


def live_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage() for x in tensors if x.device.type != "meta"}
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def settled(most):
    """Bytes that are alive. After a call Gloo's threads may hold what they sent, so we wait."""
    until = time.monotonic() + 20
    while (found := live_bytes()) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


def kept(context, zero_stage, planned):
    """Bytes of tensors that are alive in the first, and after each, of three trainings.

    Then the time limits of every process group of the rank, in seconds.
    """
    engine.STEP_TIMEOUT = LIMIT
    engine.start(context)
    seen, before = [], live_bytes()
    for _ in range(3):
        trained = step(build(zero_stage))
        seen = seen or [settled(before + NEAR * planned) - before]
        trained.close()
        ours = weakref.ref(trained)
        del trained
        assert ours() is None  # at once: DeepSpeed's engine waits for the collector, ours does not
        seen.append(settled(min(seen[1:], default=math.inf) + KEPT))
    groups = [group._get_backend(CPU) for group in distributed_c10d._world.pg_map]
    return seen, {group.options._timeout.total_seconds() for group in groups}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_keeps_no_memory_once_it_is_closed(ranks, tmp_path):
    """And every collective has our time limit."""
    weights = WIDTH**2 + WIDTH
    planned = FLOAT * weights + Footprint(weights, weights, 0, 0, 0, 0, 0).states(ranks)
    stages = (1,) if ranks == 1 else (1, 2, 3)  # the third holds what is counted as 2's, or less
    jobs = [
        {"function": kept, "zero_stage": zero, "planned": planned if zero < 3 else math.inf}
        for zero in stages
    ]
    found = run(ranks, *jobs, log=tmp_path / "log")
    for zero, ((held, *seen), limits) in zip(stages, found, strict=True):
        assert limits == {LIMIT.total_seconds()}
        assert seen[-1] - min(seen) <= KEPT
        if zero < 3:
            assert planned / NEAR <= held <= NEAR * planned


class Operators(TorchDispatchMode):
    """Names of all that torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def updated(context, zero_stage):
    """Operators of an update, that of AdamW apart, and the norm before it."""
    engine.start(context)
    trained = build(zero_stage)
    trained._adam.step = lambda *_: None  # that of a CPU reads its count of steps
    trained.backward(trained(torch.full((1, WIDTH), 1.0 + context.rank)).square().sum())
    with Operators() as seen:
        squared = trained.squared_norm()
        trained.step(1.0)
    torch.distributed.all_reduce(squared)
    return sorted(set(seen.names)), squared.sqrt().item()


def test_an_update_waits_for_nothing(tmp_path):
    """Nothing is read back from the device, and nothing summed over the ranks but gradients."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, WIDTH)
    losses = [layer(torch.full((1, WIDTH), 1.0 + rank)).square().sum() / 2 for rank in range(2)]
    sum(losses).backward()
    plain = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]).item()
    jobs = [{"function": updated, "zero_stage": zero} for zero in (1, 2)]
    for names, norm in run(2, *jobs, log=tmp_path / "log"):
        assert "aten::_foreach_norm.Scalar" in names
        waits = {"aten::_local_scalar_dense", "aten::is_nonzero", "c10d::allreduce_"}
        assert not waits & set(names)
        assert norm == pytest.approx(plain, rel=1e-5)
