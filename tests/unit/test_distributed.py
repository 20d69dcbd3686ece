"""What ranks exchange arrives as it was sent, on every rank and in their order."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from maect.core import distributed

SENT = {"a": [1, 2.5, None, True], "b": "é" * 3000, "c": {}}


def exchange(rank: int) -> None:
    for value in (SENT, None, "", [], 0):
        assert distributed.from_rank_0(value if rank == 0 else object()) == value
    assert distributed.any_rank(rank == 1) and not distributed.any_rank(False)
    assert distributed.sum_scalars([rank, torch.tensor(2.0**-40)], torch.device("cpu")) == [
        3,
        3 * 2.0**-40,
    ]


def gather(rank: int) -> None:
    # Each rank weighs every row by its own number: a row's gradient is the sum over the ranks.
    x = (torch.arange(2.0) + 10 * rank)[:, None].requires_grad_()
    rows = distributed.gather_rows(x)
    assert rows.flatten().tolist() == [0, 1, 10, 11, 20, 21]
    ((rows[:, 0] * torch.arange(6.0)).sum() * (rank + 1)).backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [6 * (2 * rank), 6 * (2 * rank + 1)]


def on_rank(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    exchange(rank)
    gather(rank)
    dist.destroy_process_group()


def test_three_ranks() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(on_rank, (port,), nprocs=3)


def test_alone() -> None:
    assert distributed.rank_and_size() == (0, 1)
    assert distributed.from_rank_0(SENT) is SENT
    assert distributed.any_rank(True) and not distributed.any_rank(False)
