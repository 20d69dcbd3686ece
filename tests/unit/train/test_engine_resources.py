"""What an engine takes hold of: process groups with their time limits, and memory until it ends."""

import gc
from datetime import timedelta

import pytest
import torch
from ranks import run
from torch.distributed import distributed_c10d

from maect.stages import load_recipe
from maect.train import engine

LIMIT = timedelta(minutes=17)  # no backend's own
WIDTH = 512


def build(zero_stage: int) -> engine.Engine:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    settings = load_recipe("mae", "base", {"batch_size": 2, "zero_stage": zero_stage})
    group = {"params": list(layer.parameters()), "peak_lr": 1e-3, "weight_decay": 0.0}
    return engine.Engine(layer, settings, [group], torch.device("cpu"))


def limits(context, zero_stage):
    """Time limits of every process group of a rank, after a step."""
    engine.STEP_TIMEOUT = LIMIT
    engine.start(context)
    trained = build(zero_stage)
    trained.backward(trained(torch.ones(1, WIDTH)).sum())
    trained.step(1.0)
    groups = distributed_c10d._world.pg_map
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_collective_has_our_time_limit(zero_stage, tmp_path):
    seen = run(2, {"function": limits, "zero_stage": zero_stage}, log=tmp_path / "log")
    assert seen[0] and set(seen[0]) == {LIMIT.total_seconds()}


def live_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage() for x in tensors if x.device.type != "meta"}
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def kept(context, zero_stage):
    """Bytes of tensors that are alive after each of three trainings in one process."""
    engine.start(context)
    seen = []
    for _ in range(3):
        trained = build(zero_stage)
        trained.backward(trained(torch.ones(1, WIDTH)).sum())
        trained.step(1.0)
        trained.close()
        del trained
        seen.append(live_bytes())
    return seen


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_an_engine_keeps_no_memory_once_it_is_closed(zero_stage, tmp_path):
    seen = run(2, {"function": kept, "zero_stage": zero_stage}, log=tmp_path / "log")[0]
    assert seen[-1] - seen[0] < 4 * WIDTH
