"""What ranks exchange arrives as it was sent, on every rank and in their order."""

import socket
import threading
import time
from datetime import timedelta
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import NodeError
from maect.train import checkpoint

SENT = {"a": [1, 2.5, None, True], "b": "é" * 3000, "c": {}}


def on_rank(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    for value in (SENT, None, "", [], 0):
        assert distributed.from_rank_0(value if rank == 0 else object()) == value
    assert distributed.any_rank(rank == 1) and not distributed.any_rank(False)
    sums = distributed.sum_scalars([rank, torch.tensor(2.0**-40)], torch.device("cpu"))
    assert sums == [3, 3 * 2.0**-40]
    # Each rank weighs every row by its own number: a row's gradient is the sum over the ranks.
    x = (torch.arange(2.0) + 10 * rank)[:, None].requires_grad_()
    rows = distributed.gather_rows(x)
    assert rows.flatten().tolist() == [0, 1, 10, 11, 20, 21]
    ((rows[:, 0] * torch.arange(6.0)).sum() * (rank + 1)).backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [6 * (2 * rank), 6 * (2 * rank + 1)]
    dist.destroy_process_group()


def test_three_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    set_forkserver_preload(["maect.train.checkpoint"])  # imported once, not by each rank
    multiprocessing.start_processes(on_rank, (port,), nprocs=3, start_method="forkserver")


def test_alone():
    assert distributed.rank_and_size() == (0, 1)
    assert distributed.from_rank_0(SENT) is SENT
    assert distributed.any_rank(True) and not distributed.any_rank(False)


class FirstOfTwo(Context):
    world_size = local_world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[BaseException] = []
        self.told = threading.Event()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.told.set()


@pytest.fixture()
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(distributed, "FIRST_EXCHANGE", timedelta(seconds=0.2))
    return 0.2


def test_a_network_that_leads_nowhere_is_found_in_minutes(short):
    """From beside the main thread, which NCCL may never let go."""
    assert timedelta(minutes=1) < distributed.STEP_TIMEOUT / 5
    store, rank = dist.HashStore(), FirstOfTwo()
    store.set("here-1", "")
    with distributed._in_time(rank, store):
        assert rank.told.wait(60)
    (error,) = rank.failed
    assert isinstance(error, NodeError) and "\n" not in str(error)
    assert "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME" in str(error)


def test_ranks_that_start_late_are_waited_for(short):
    """A node may take minutes to read the packages."""
    store, rank = dist.HashStore(), FirstOfTwo()
    late = threading.Timer(5 * short, lambda: store.set("here-1", ""))
    late.start()
    with distributed._in_time(rank, store):
        assert store.check(["here-1"])
    time.sleep(2 * short)  # nothing is left behind that could fail later
    assert not rank.failed


def test_files_are_waited_for_less_long_than_exchanges():
    """Ranks wait for rank 0 while it waits for their files."""
    assert distributed.STEP_TIMEOUT.total_seconds() / 2 >= checkpoint._WAIT_FOR_RANKS
