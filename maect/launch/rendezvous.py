"""Rendezvous of a job's ranks, in which nobody else takes part.

submitit's `TorchDistributedEnvironment` is not used: it derives the port from the job's id, which
two local jobs or two clusters may share, gives a requeued job the same one again, knows nothing of
a site's MASTER_ADDR, and leaves the store open to everyone who reaches the port.

Torch's TCPStore asks nobody for a password: whoever connects may read and replace any key. So the
ranks of one node meet in a file in a folder that only this user can enter. Those of several nodes
need a port: it listens on the ranks' interface only, and all keys stand behind a secret that rank 0
writes into its own file. `docs/reference/other_users.md` says what that leaves open.
"""

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from maect.core.errors import NodeError, UserError
from maect.launch.record import RankReport, rank_file

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 600.0  # seconds; the nodes of a large job start minutes apart
QUEUE = 1024  # connections that wait to be accepted, while rank 0 still imports torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Address and secret that rank 0 publishes.

    Attributes:
        attempt: of the job (restarts by SLURM): ranks of the last one may be alive.
        host: the first node: loopback, where there is only one.
        secret: stands before every key.
        file, port: of the store, on one node and on several.
    """

    attempt: int
    host: str
    secret: str
    file: str = ""
    port: int = 0


class Rendezvous:
    """One rank's way to the others, on these hosts, at the job's attempt (restarts by SLURM).

    Rank 0 publishes its address in its own file, where the others look for it.
    """

    def __init__(
        self, published: Path, attempt: int, rank: int, size: int, hosts: list[str]
    ) -> None:
        self.rank, self.size = rank, size
        self._listener: socket.socket | None = None
        self._folder = ""
        self._base: Store | None = None
        self._groups = 0
        self.address = self._open(attempt, hosts) if rank == 0 else _find(published, attempt)

    def store(self, timeout: timedelta) -> "Store":
        """The store in which the next process group meets; on every rank as often."""
        from torch.distributed import PrefixStore

        self._base = self._base or self._connect(timeout)
        self._groups += 1  # a group must not read what one before it has left
        return PrefixStore(f"{self.address.secret}/{self._groups}", self._base)

    def _connect(self, timeout: timedelta) -> "Store":
        from torch.distributed import FileStore, TCPStore

        if self.address.file:
            store = FileStore(self.address.file, self.size)
            store.set_timeout(timeout)  # it has five minutes of its own
            return store
        return TCPStore(
            self.address.host,
            self.address.port,
            self.size,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            # The store closes it.
            master_listen_fd=self._listener.detach() if self._listener else None,
        )

    def close(self) -> None:
        """Remove what this rank has made."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, attempt: int, hosts: list[str]) -> Address:
        secret = secrets.token_hex(16)
        if len(hosts) == 1:
            if self.size > 1:
                _check_loopback()
            self._folder = tempfile.mkdtemp(prefix="maect-")  # for this user alone
            return Address(attempt, "127.0.0.1", secret, file=f"{self._folder}/store")
        # A site's script may name the fast interface.
        address = os.environ.get("MASTER_ADDR") or hosts[0]
        self._listener = _listen(address)
        return Address(attempt, address, secret, port=self._listener.getsockname()[1])


def remove_folder(folder: Path, name: str) -> None:
    """Remove the folder in which the ranks of a job on this machine met, if rank 0 could not."""
    report = RankReport.read(rank_file(folder, name, 0))
    if report and report.meeting and report.meeting.get("file"):
        shutil.rmtree(Path(report.meeting["file"]).parent, ignore_errors=True)


def _check_loopback() -> None:
    """Refuse a node whose ranks do not reach each other: they would wait for the time limit."""
    if os.environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo":
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect(("127.0.0.1", 9))  # this finds a route and sends nothing
    except OSError as error:
        raise UserError(
            f"127.0.0.1: {error.strerror}: ranks of a node talk through its interface lo, which "
            "is down (ip link set lo up); GLOO_SOCKET_IFNAME names another one"
        ) from None


def _listen(address: str) -> socket.socket:
    """A socket on a port that the kernel has free, reached under this name only."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    here = str(where[0])
    if here.startswith("127.0.1."):
        # Debian lets a machine call itself so; other nodes know another address of that name.
        logger.warning("%s is %s here: listening on all interfaces", address, here)
        family, here = socket.AF_INET, ""
    listener = socket.socket(family, kind, protocol)
    listener.bind((here, 0))
    listener.listen(QUEUE)
    return listener


def _find(published: Path, attempt: int) -> Address:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        report = RankReport.read(published)
        if report and report.meeting and report.meeting["attempt"] == attempt:
            return Address(**report.meeting)
        time.sleep(0.05)
    raise NodeError(
        f"waited {PATIENCE:.0f} s for rank 0 ({published}): "
        "is the folder on a file system that all nodes share?"
    )
