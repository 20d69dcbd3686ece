"""The job of `maect doctor`: devices, the network between them, a step, the shared file system."""

import importlib.util
import platform
import socket
import time
from pathlib import Path
from typing import Any

from maect.core.context import Context
from maect.core.distributed import destroy_group_after, driver, from_all
from maect.core.files import write_json
from maect.stages import load_recipe

SEEN = 60.0  # seconds for a file to become visible on another node
MEGABYTES = {"cuda": 256, "cpu": 8}
WIDTH = 64  # of the layer that is trained
ROUNDS = 5  # copies that are timed
OUTSIDE = ("www.python.org", 443)


def probe(context: Context, folder: str) -> str:
    """Probe this rank; rank 0 writes the reports of all to `probe.json`."""
    import torch
    import torch.distributed as dist

    from maect.train.engine import start

    device = start(context)
    cuda = device.type == "cuda"
    with destroy_group_after():
        own = torch.full((1,), float(context.rank), device=device)
        dist.all_reduce(own)
        seen = {
            "host": socket.gethostname(),
            "node": context.node,
            "devices": _device_ids(torch) if cuda else [],
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "driver": driver(),
            "sum": own.item(),
            "files": _files_seen(context, Path(folder)),
            "gigabytes": _bandwidth(device),
            "trained": _trained(context, device),
        }
        everyone = from_all(seen)
    if context.rank == 0:
        write_json(Path(folder) / "probe.json", {"ranks": everyone, **_about(torch)})
    return "done"


def _trained(context: Context, device: Any) -> float:
    """Sum of a layer's weights after a step of the engine that trainings use, under ZeRO 1.

    The same on all ranks if the step has worked.
    """
    import torch

    from maect.train.engine import Engine
    from maect.train.optimizer import grouped

    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, WIDTH).to(device)
    settings = load_recipe("mae", "base", {"batch_size": context.world_size})
    groups = grouped(layer, lambda name: (0.1, 0.0))
    engine = Engine(layer, settings, groups, device)
    x = torch.full((1, WIDTH), 1.0 + context.rank, device=device)
    engine.backward(engine(x).square().mean())
    engine.step(1.0)
    engine.close()
    return float(layer.weight.detach().double().sum())


def _device_ids(torch: Any) -> list[str]:
    """Return a unique name of each device that this rank sees."""
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [str(getattr(device, "uuid", number)) for number, device in enumerate(devices)]


def _files_seen(context: Context, folder: Path) -> int:
    """Return how many ranks' files this rank comes to see."""
    write_json(folder / f"seen-{context.rank}.json", context.rank)
    deadline = time.monotonic() + SEEN
    while True:
        count = len(list(folder.glob("seen-*.json")))
        if count == context.world_size or time.monotonic() > deadline:
            return count
        time.sleep(0.2)


def _bandwidth(device: Any) -> float:
    """Measure the GB/s of a large all-reduce: bytes of the tensor over its time."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(MEGABYTES[device.type] * 250_000, device=device)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 4e-9 * tensor.numel() * ROUNDS / (time.perf_counter() - start)


def _about(torch: Any) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions["flash-attn"] = "yes" if importlib.util.find_spec("flash_attn") else "no"
    try:
        socket.create_connection(OUTSIDE, timeout=3).close()
        internet = True
    except OSError:
        internet = False
    return {"versions": versions, "internet": internet}
