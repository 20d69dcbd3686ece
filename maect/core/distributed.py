"""The process group: joining it, this rank's device, and exchanges between ranks.

The one module of `core` that imports torch. Without a process group every exchange is a no-op.
"""

import ctypes
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maect.core.context import Context
from maect.core.errors import NodeError, UserError

# The last resort: before it, the watchdog ends a stalled step and says which rank is missing.
STEP_TIMEOUT = timedelta(minutes=30)
# A rank may wait for another one that works on its share of an evaluation for hours.
SHARE_TIMEOUT = timedelta(hours=12)
FIRST_EXCHANGE = timedelta(minutes=3)
"""From when all ranks are there: NCCL may wait for ever at an interface that leads nowhere."""
DRIVER = Path("/proc/driver/nvidia/version")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def use_full_float32() -> None:
    """Compute products and convolutions of this process in float32 where TF32 is the default."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def device_of(context: Context) -> torch.device:
    """Return this rank's GPU, or the CPU with this rank's threads; both compute in full float32.

    Raises:
        NodeError: the job was given GPUs, and torch can use none, or another process has it alone.
            `DS_ACCELERATOR=cpu`, which is DeepSpeed's, asks for the CPU all the same.
    """
    use_full_float32()
    if context.gpus and not torch.cuda.is_available() and not _cpu_is_asked_for():
        raise NodeError(_no_gpu())
    if uses_gpus():
        device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
        try:
            torch.cuda.set_device(device)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "busy or unavailable" not in str(error):
                raise
            raise NodeError(
                f"{device} is busy: another process has it, and its compute mode lets only one "
                "(nvidia-smi -q -d COMPUTE); try again when that has ended"
            ) from None
        return device
    torch.set_num_threads(max(1, context.cpus))
    return torch.device("cpu")


def be_deterministic() -> None:
    """Let GPUs compute the same bits at every start; to be called before they are used.

    PyTorch then sums in a fixed order (also in attention's backward pass), or raises where it
    cannot; cuBLAS has one workspace a stream, NCCL adds up in rings, not inside switches, and the
    compiler chooses kernels by rules, not by their times.

    Raises:
        UserError: the environment says otherwise.
    """
    if not uses_gpus():
        return
    # What gathers and scatters, NCCL does in rings alone.
    workspaces = (":4096:8", ":16:8")
    sums = ("Ring",)
    tf32 = ("0",)
    for name, allowed in (
        ("CUBLAS_WORKSPACE_CONFIG", workspaces),
        ("NCCL_ALGO", sums),
        ("NVIDIA_TF32_OVERRIDE", tf32),
        ("TORCHINDUCTOR_DETERMINISTIC", ("1",)),  # read when the compiler is imported
    ):
        said = os.environ.setdefault(name, allowed[0])
        if said not in allowed:
            raise UserError(
                f"deterministic: true does not go with {name}={said}: {' or '.join(allowed)}"
            )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def uses_gpus() -> bool:
    """Return whether ranks compute on GPUs here."""
    return torch.cuda.is_available() and not _cpu_is_asked_for()


def _cpu_is_asked_for() -> bool:
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def driver() -> str:
    """Return the version of this node's NVIDIA driver, such as 580.95.05; "" if unknown."""
    try:
        found = re.search(r"\b[0-9]{3}\.[0-9.]+\b", DRIVER.read_text().splitlines()[0])
    except (OSError, IndexError):
        return ""
    return found[0] if found else ""


def _no_gpu() -> str:
    """Return why torch can use no GPU, with the versions that decide it, in a line."""
    try:
        torch.cuda.init()
        reason = "no device"
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return (
        f"the job was given GPUs, and torch {torch.__version__}, built for {built}, can use none: "
        f"{reason} (driver: {driver() or 'none loaded'}; "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); for an older "
        "driver install wheels of an older CUDA (docs/gpu.md), or set DS_ACCELERATOR=cpu to "
        "compute on CPUs"
    )


def join(context: Context, backend: str, timeout: timedelta) -> None:
    """Join the process group, where the launcher lets the ranks meet.

    It fails if nothing can be exchanged within `FIRST_EXCHANGE`; `timeout` is that of later
    exchanges, and of waiting for ranks that start late.
    """
    if dist.is_initialized():
        return
    store = context.store(timeout)
    with _in_time(context, store):
        # Communicators begin here, where what is wrong with them is plain, not in the first step.
        only_gpus = backend == "nccl"
        gpu = torch.device("cuda", torch.cuda.current_device()) if only_gpus else None
        dist.init_process_group(
            backend,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
            device_id=gpu,
        )
        barrier()


@contextmanager
def _in_time(context: Context, store: dist.Store) -> Iterator[None]:
    """Wait until every rank is there, and then for as long as `FIRST_EXCHANGE` for the block."""
    if context.world_size == 1:
        yield
        return
    store.set(f"here-{context.rank}", "")
    store.wait([f"here-{rank}" for rank in range(context.world_size)])
    minutes = FIRST_EXCHANGE.total_seconds() / 60
    error = NodeError(
        f"all {context.world_size} ranks have started, but they exchanged nothing within "
        f"{minutes:.3g} minutes; name the nodes' network interface in the setup script: "
        "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    )
    timer = Timer(FIRST_EXCHANGE.total_seconds(), lambda: context.fail(error))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave() -> None:
    """End a job's group of GPUs: NCCL may wait for others when a process just ends."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.destroy_process_group()


@contextmanager
def process_group(context: Context) -> Iterator[None]:
    """Join the other ranks, if there are any, for as long as the block runs."""
    if context.world_size == 1 or dist.is_initialized():
        yield
        return
    join(context, "cpu:gloo,cuda:nccl" if uses_gpus() else "gloo", SHARE_TIMEOUT)
    with destroy_group_after():
        yield


@contextmanager
def destroy_group_after() -> Iterator[None]:
    """Leave the process group at the end of the block, but not where this rank fails on a GPU.

    NCCL's end would wait for ranks that wait for this one. Its error ends the process, and with it
    their exchange.
    """
    try:
        yield
    except Exception:
        if not uses_gpus():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device through pinned memory, which lives until the device has finished.

    Memory that is not pinned may be copied while somebody else has it already, where a GPU reads
    the host's by itself (Grace Hopper).
    """
    if device.type == "cuda" and values.device.type == "cpu":
        # Pinned with gaps, it would be copied by way of memory that is not.
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: pages that the kernel clears again cost an eighth of a step."""
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 * 2**20)
        libc.mallopt(trim_threshold, 2**31 - 1)


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def share_of(context: Context, n: int, batch: int) -> range:
    """Return this rank's rows of n: whole batches, which are equal at every world size."""
    share = -(-n // (context.world_size * batch)) * batch
    return range(min(n, share * context.rank), min(n, share * (context.rank + 1)))


def gather_rows(x: Tensor) -> Tensor:
    """Gather the rows of all ranks, [b, ...] to [world * b, ...]; gradients pass through.

    In the backward pass the gradients that the ranks have for a row are summed: with each rank's
    loss a mean over its own rows, averaging the parameters' gradients over the ranks then gives
    the gradient of the global mean.
    """
    if rank_and_size()[1] == 1:
        return x
    return _GatherRows.apply(x)


class _GatherRows(torch.autograd.Function):
    # torch.distributed.nn.functional.all_gather is deprecated, and its successor is private.

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


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum of a tensor over the ranks, in place."""
    if rank_and_size()[1] > 1:
        dist.all_reduce(values)
    return values


def sum_scalars(values: Sequence[float | Tensor], device: torch.device) -> list[float]:
    """Sum scalars over the ranks in float64 and return Python floats; waits for the device once."""
    return [float(v) for v in sum_on_device(values, device).tolist()]


def sum_on_device(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Sum scalars over the ranks, float64 [n], without waiting for the device."""
    parts = [
        value.detach().reshape(()).to(device, torch.float64)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)  # a kernel, not a copy
        for value in values
    ]
    return sum_over_ranks(torch.stack(parts))


def differing_ranks(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ranks whose copies of tensors have other bits than most; called on all ranks.

    Sums of the bits as integers are compared: any one that flips is seen.
    """
    if rank_and_size()[1] == 1:
        return []
    total: Tensor | None = None
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        part = bits.sum(dtype=torch.int64).reshape(1)
        total = part if total is None else 1_000_003 * total + part  # modulo 2^64
    if total is None:
        return []
    sums = gather_rows(total).tolist()
    ((most, _),) = Counter(sums).most_common(1)
    return [rank for rank, found in enumerate(sums) if found != most]


def any_rank(flag: bool) -> bool:
    """Return whether the value is true on any rank; waits for all of them."""
    if rank_and_size()[1] == 1:
        return flag
    value = torch.tensor([int(flag)], device=_exchange_device())
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


def barrier() -> None:
    """Wait for all ranks."""
    any_rank(False)


def store_barrier(where: str) -> None:
    """Wait for all ranks for as long as `SHARE_TIMEOUT`; collectives of a training end earlier.

    Args:
        where: a name that a process group meets by once.
    """
    rank, size = rank_and_size()
    if size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where}-{rank}", "")
    store.wait([f"{where}-{other}" for other in range(size)], SHARE_TIMEOUT)


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank, sent as JSON: nothing that arrives is executed.

    The other ranks' argument is not read. Tuples arrive as lists.
    """
    return from_all(value if rank_and_size()[0] == 0 else None)[0]


def from_all(value: Any) -> list[Any]:
    """Return every rank's value on every rank, in order of ranks, sent as JSON."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    device = _exchange_device()
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    text = bytearray(data.ljust(int(longest)))
    own = torch.frombuffer(text, dtype=torch.uint8).to(device)
    out = torch.empty(size * len(own), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(out, own)
    return [json.loads(bytes(part.tolist())) for part in out.cpu().chunk(size)]


def _exchange_device() -> torch.device:
    """Return where a tensor has to be that the ranks exchange: NCCL alone knows only GPUs."""
    only_nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_nccl else torch.device("cpu")
