"""The ranks meet where nobody else can take part, or at least where nothing is executed."""

import json
import multiprocessing
import os
import stat
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed  # noqa: F401  (once for both ranks below)
from exchanging import check, exchange
from launching import Run, finish, wait_for

from maect.core.errors import NodeError
from maect.launch.record import make_job_folder, rank_file
from maect.launch.worker import Rank, RankFile


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports on which a process waits for connections."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [(at.laddr.ip, at.laddr.port) for at in connections if at.status == psutil.CONN_LISTEN]


def test_one_node_has_no_port(tmp_path: Path) -> None:
    run = Run(tmp_path / f"run{time.monotonic_ns()}", devices=2)
    try:
        launcher = run.start(function="exchanging:exchange")
        run.reaches(1)
        ours = [port for process in run.processes() for port in listening(process)]
        assert {address for address, _ in ours} <= {"127.0.0.1", "::1"}
        met = Path(run.address()).parent
        for private in (met, run.folder / "jobs"):
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
        (run.folder / "enough").touch()
        words = finish(launcher)
        assert launcher.returncode == 0, words
        check(json.loads((run.folder / "done.json").read_text()))
        assert len(run.job().earlier) == 0
        wait_for(lambda: not met.exists())
    finally:
        run.end()


def rank_of(folder: Path, number: int, size: int, attempt: int = 0, nodes: int = 1) -> Rank:
    """A rank, as the worker makes it."""
    return Rank(
        rank=number, local_rank=0, world_size=size, local_world_size=size // nodes, node=0,
        nodes=nodes, cpus=1, gpus=False, folder=folder, name="job", attempt=attempt,
        file=RankFile(folder, "job", number, attempt),
    )  # fmt: skip


def on_node(folder: Path, number: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    exchange(context=rank_of(folder, number, 2, nodes=2), folder=str(folder))


def test_ranks_of_several_nodes_meet_at_a_port(tmp_path: Path) -> None:
    make_job_folder(tmp_path, "job")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=on_node, args=(tmp_path, number)) for number in range(2)]
    for process in ranks:
        process.start()
    try:
        file = rank_file(tmp_path, "job", 0)
        wait_for(lambda: file.exists() and json.loads(file.read_text())["progress"])
        assert json.loads(file.read_text())["address"].startswith("127.0.0.1:")
        (tmp_path / "enough").touch()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
        check(json.loads((tmp_path / "done.json").read_text()))
    finally:
        for process in ranks:
            process.kill()


def test_a_group_does_not_meet_in_what_one_before_it_left(tmp_path: Path) -> None:
    make_job_folder(tmp_path, "job")
    rank = rank_of(tmp_path, 0, 2)
    first = rank.store(timedelta(hours=12))
    assert first.timeout == timedelta(hours=12), "a file store had five minutes, whatever was asked"
    first.set("key", "value")
    assert not rank.store(timedelta(seconds=5)).check(["key"])
    folder = Path(rank.address).parent
    rank.close()
    assert not folder.exists()


def test_rank_0_that_does_not_come_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maect.launch.rendezvous.PATIENCE", 0.2)
    make_job_folder(tmp_path, "job")
    second = timedelta(seconds=1)
    old = rank_of(tmp_path, 0, 2)
    old.store(second)
    # What an attempt before this one has written under the same id is not taken for this one's.
    with pytest.raises(NodeError, match="all nodes share"):
        rank_of(tmp_path, 1, 2, attempt=1).store(second)
    # Nor is it in the way of this one's: the attempt before may live on, cut off from SLURM.
    new = rank_of(tmp_path, 0, 2, attempt=1)
    new.store(second)
    follower = rank_of(tmp_path, 1, 2, attempt=1)
    follower.store(second)
    assert follower.address == new.address != old.address
    old.close()
    new.close()
