"""A job that looks at the nodes: devices, the network between them, the shared file system."""

import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from maect.core.files import read_json, write_json
from maect.launch import LaunchError, Resources, Task, launch
from maect.tools.doctor.findings import Finding

SEEN = 60.0  # seconds for a file to become visible on another node
MEGABYTES = {"cuda": 256, "cpu": 8}
REPORT = 8192  # bytes of a rank's report, more than it needs
TIMEOUT = timedelta(minutes=30)
OUTSIDE = ("www.python.org", 443)


def run_probe(root: Path, wanted: Resources) -> list[Finding]:
    """Run the job in the experiment's own storage and judge what its ranks saw."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f".doctor-{os.getpid()}-{int(time.time())}"
    result = folder / "probe.json"
    where = f"{wanted.nodes} node{'s' if wanted.nodes > 1 else ''} x {wanted.devices}"
    try:
        launch(
            Task("maect.tools.doctor.probe:probe", {"folder": str(folder.absolute())}),
            folder, wanted, is_done=result.exists, describe=f"doctor on {where}",
        )  # fmt: skip
    except LaunchError as error:
        hint = f"logs: {folder}; the last lines say why, often the setup script or the network"
        return [Finding("FAIL", f"job on {where}: {error}", hint)]
    found = judge(read_json(result), wanted)
    shutil.rmtree(folder, ignore_errors=True)
    return found


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
            "promised": len(
                [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
            ),
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


def judge(found: dict[str, Any], wanted: Resources) -> list[Finding]:
    """What the ranks' reports mean."""
    ranks, count = found["ranks"], len(found["ranks"])
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    out = [
        Finding("ok", f"job on {len({r['node'] for r in ranks})} nodes, {count} ranks: {versions}")
    ]
    promised = max(r["promised"] for r in ranks)
    # Where srun binds a device to each rank, a rank sees only its own.
    nodes = [{d for r in ranks if r["node"] == node for d in r["devices"]} for node in
             {r["node"] for r in ranks}]  # fmt: skip
    devices = min(map(len, nodes))
    names = ", ".join(sorted({r["device"] for r in ranks}))
    if devices >= wanted.devices:
        out.append(Finding("ok", f"{devices} GPUs a node: {names}"))
    elif promised or devices:
        hint = (
            "the driver may be older than this torch needs (nvidia-smi there); or lower `devices`"
        )
        out.append(Finding("FAIL", f"{promised} GPUs were given, torch sees {devices}", hint))
    else:
        out.append(Finding("note", "no GPU: ranks run on the CPU"))
    kind = "NCCL" if devices else "gloo"
    if all(r["sum"] == count * (count - 1) / 2 for r in ranks):
        slowest = min(r["gigabytes"] for r in ranks)
        out.append(Finding("ok", f"{kind} all-reduce over {count} ranks: {slowest:.2f} GB/s"))
    else:
        hint = "name the interface in the setup script: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        out.append(Finding("FAIL", f"{kind} all-reduce gives a wrong sum", hint))
    if all(r["files"] == count for r in ranks):
        out.append(Finding("ok", "every rank sees the files of all others"))
    else:
        hint = "set `storage` in the experiment to a file system that all nodes share"
        out.append(Finding("FAIL", "files written on one node are not seen on another", hint))
    open_ = found["internet"]
    return [*out, Finding("note", f"compute nodes {'reach' if open_ else 'have no'} internet")]


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
