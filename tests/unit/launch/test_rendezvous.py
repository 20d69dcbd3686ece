"""The ranks meet where nobody else can take part, or at least where nothing is executed."""

import json
import multiprocessing
import os
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from exchanging import check
from launching import HERE, finish, wait_for
from torch.distributed import TCPStore

from maect.core.context import Context
from maect.core.errors import NodeError
from maect.launch.record import make_job_folder, rank_file
from maect.launch.rendezvous import Rendezvous, find_rendezvous, open_rendezvous
from maect.launch.worker import RankFile


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports on which a process waits for connections."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [(at.laddr.ip, at.laddr.port) for at in connections if at.status == psutil.CONN_LISTEN]


def test_one_node_has_no_port(run):
    run.resources["devices"] = 2
    launcher = run.start(function="exchanging:exchange")
    run.reaches(1)
    ours = [port for process in run.processes() for port in listening(process)]
    assert {address for address, _ in ours} <= {"127.0.0.1", "::1"}
    published = run.rendezvous()
    assert published["port"] == 0 and os.path.exists(published["file"])
    for private in (Path(published["file"]).parent, run.folder / "jobs" / run.job().name):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (run.folder / "enough").touch()
    words = finish(launcher)
    assert launcher.returncode == 0, words
    check(json.loads((run.folder / "done.json").read_text()))
    assert len(run.job().earlier) == 0
    wait_for(lambda: not Path(published["file"]).parent.exists())


def met(
    folder: Path, attempt: int, rank: int, size: int, hosts: Sequence[str] = ("here",)
) -> Rendezvous:
    """A rank's way to the others; rank 0 publishes it, as the worker does."""
    if rank > 0:
        return find_rendezvous(rank_file(folder, "job", 0), attempt, size)
    rendezvous = open_rendezvous(attempt, size, list(hosts))
    RankFile(folder, "job", 0, attempt).note(meeting=asdict(rendezvous.address))
    return rendezvous


class Rank(Context):
    """One of two ranks on two nodes that both are this machine."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        self.folder, self.rank, self.world_size = folder, rank, 2
        self.rendezvous = met(folder, 0, rank, 2, ["n1", "n2"])

    def store(self, timeout: timedelta) -> object:
        return self.rendezvous.store(timeout)

    def report(self, progress: dict[str, int]) -> None:
        (self.folder / "met").touch()


def on_node(folder: Path, rank: int) -> None:
    sys.path.insert(0, str(HERE))
    from exchanging import exchange

    exchange(context=Rank(folder, rank), folder=str(folder))


def test_on_several_nodes_the_port_answers_on_the_ranks_interface_alone(tmp_path):
    """All keys stand behind the secret of rank 0."""
    make_job_folder(tmp_path, "job")
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=on_node, args=(tmp_path, rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        file = rank_file(tmp_path, "job", 0)
        wait_for(file.exists)
        published = json.loads(file.read_text())["meeting"]
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", published["port"]), 5):
            pass
        wait_for((tmp_path / "met").exists)
        port, patience = published["port"], timedelta(seconds=5)
        store = TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False)
        keys = store.list_keys()
        assert keys and all(key.startswith(published["secret"]) for key in keys)
        (tmp_path / "enough").touch()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
        check(json.loads((tmp_path / "done.json").read_text()))
    finally:
        for process in ranks:
            process.kill()


def test_a_group_does_not_meet_in_what_one_before_it_left(tmp_path):
    make_job_folder(tmp_path, "job")
    rendezvous = met(tmp_path, 0, 0, 1)
    first = rendezvous.store(timedelta(hours=12))
    assert first.timeout == timedelta(hours=12), "a file store had five minutes, whatever was asked"
    first.set("key", "value")
    assert not rendezvous.store(timedelta(seconds=5)).check(["key"])
    folder = Path(rendezvous.address.file).parent
    rendezvous.close()
    assert not folder.exists()


def test_rank_0_that_does_not_come_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("maect.launch.rendezvous.PATIENCE", 0.2)
    make_job_folder(tmp_path, "job")
    # What an attempt before this one has written under the same id is not taken for this one's.
    old = met(tmp_path, 0, 0, 1)
    assert met(tmp_path, 0, 1, 2).address == old.address
    with pytest.raises(NodeError, match="all nodes share"):
        met(tmp_path, 1, 1, 2)
    # Nor is it in the way of this one's: the attempt before may live on, cut off from SLURM.
    new = met(tmp_path, 1, 0, 1)
    assert met(tmp_path, 1, 1, 2).address == new.address != old.address
    old.close()
    new.close()
