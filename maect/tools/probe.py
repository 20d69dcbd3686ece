"""The job of `maect doctor`: devices, the network between them, the shared file system."""

import importlib.util
import json
import platform
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from maect.core.files import write_json
from maect.launch.resources import visible_devices

SEEN = 60.0  # seconds for a file to become visible on another node
MEGABYTES = {"cuda": 256, "cpu": 8}
REPORT = 8192  # bytes of a rank's report, more than it needs
TIMEOUT = timedelta(minutes=30)
OUTSIDE = ("www.python.org", 443)


def probe(context: Any, folder: str) -> str:
    """On every rank; rank 0 writes what all have seen to `probe.json`."""
    import torch
    import torch.distributed as dist

    from maect.core.distributed import device_of, join

    device = device_of(context)
    cuda = device.type == "cuda"
    join(context, "cpu:gloo,cuda:nccl" if cuda else "gloo", TIMEOUT)
    try:
        own = torch.full((1,), float(context.rank), device=device)
        dist.all_reduce(own)
        seen = {
            "host": socket.gethostname(),
            "node": context.node,
            "promised": visible_devices() or 0,
            "devices": _device_ids(torch) if cuda else [],
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "sum": own.item(),
            "files": _files_seen(context, Path(folder)),
            "gigabytes": _bandwidth(device),
        }
        everyone = _gather(seen)
    finally:
        dist.destroy_process_group()
    if context.rank == 0:
        write_json(Path(folder) / "probe.json", {"ranks": everyone, **_about(torch)})
    return "done"


def _gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's value: as JSON, since what arrives must not be executed."""
    import torch
    import torch.distributed as dist

    own = torch.frombuffer(bytearray(json.dumps(value).encode().ljust(REPORT)), dtype=torch.uint8)
    rows = torch.empty(dist.get_world_size() * REPORT, dtype=torch.uint8)
    dist.all_gather_into_tensor(rows, own)
    return [json.loads(bytes(row.numpy())) for row in rows.view(-1, REPORT)]


def _device_ids(torch: Any) -> list[str]:
    """Every device that this rank sees, by what tells it from the others of its node."""
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [str(getattr(device, "uuid", number)) for number, device in enumerate(devices)]


def _files_seen(context: Any, folder: Path) -> int:
    """How many ranks' files this rank comes to see."""
    write_json(folder / f"seen-{context.rank}.json", context.rank)
    deadline = time.monotonic() + SEEN
    while True:
        count = len(list(folder.glob("seen-*.json")))
        if count == context.world_size or time.monotonic() > deadline:
            return count
        time.sleep(0.2)


def _bandwidth(device: Any, rounds: int = 5) -> float:
    """GB/s of a large all-reduce: bytes of the tensor over the time of one."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(MEGABYTES[device.type] * 250_000, device=device)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 4e-9 * tensor.numel() * rounds / (time.perf_counter() - start)


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
