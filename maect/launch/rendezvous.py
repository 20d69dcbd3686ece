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

from maect.core.errors import NodeError
from maect.launch.record import RankReport

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
        host: the first node: loopback if there is only one.
        secret: prefix of every key.
        file, port: of the store, on one node and on several.
    """

    attempt: int
    host: str
    secret: str
    file: str = ""
    port: int = 0


class Rendezvous:
    """One rank's connection to the store that all ranks share."""

    def __init__(self, address: Address, size: int, listener: socket.socket | None = None) -> None:
        """Prepare a connection; rank 0 gives the `listener` on which the store is served."""
        self.address = address
        self._size = size
        self._listener = listener
        self._base: Store | None = None
        self._groups = 0

    def store(self, timeout: timedelta) -> "Store":
        """Return the store of the next process group; every rank calls this as often."""
        from torch.distributed import PrefixStore

        if self._base is None:
            self._base = self._connect(timeout)
        self._groups += 1  # a group must not read keys of the one before it
        return PrefixStore(f"{self.address.secret}/{self._groups}", self._base)

    def _connect(self, timeout: timedelta) -> "Store":
        from torch.distributed import FileStore, TCPStore

        if self.address.file:
            store = FileStore(self.address.file, self._size)
            store.set_timeout(timeout)  # else five minutes
            return store
        return TCPStore(
            self.address.host,
            self.address.port,
            self._size,
            is_master=self._listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            # The store closes it.
            master_listen_fd=self._listener.detach() if self._listener else None,
        )

    def close(self) -> None:
        """Remove the folder of the file in which the ranks met; rank 0 does."""
        if self.address.file:
            shutil.rmtree(Path(self.address.file).parent, ignore_errors=True)


def open_rendezvous(attempt: int, size: int, hosts: list[str]) -> Rendezvous:
    """Open the store of rank 0 for `size` ranks on these hosts, at an attempt of the job."""
    secret = secrets.token_hex(16)
    if len(hosts) == 1:
        folder = tempfile.mkdtemp(prefix="maect-")  # for this user alone
        return Rendezvous(Address(attempt, "127.0.0.1", secret, file=f"{folder}/store"), size)
    # A site's script may name the fast interface.
    host = os.environ.get("MASTER_ADDR") or hosts[0]
    listener = _listen(host)
    port = listener.getsockname()[1]
    return Rendezvous(Address(attempt, host, secret, port=port), size, listener)


def find_rendezvous(published: Path, attempt: int, size: int) -> Rendezvous:
    """Wait for the address in rank 0's file; NodeError if it does not come."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        report = RankReport.read(published)
        if report and report.meeting and report.meeting["attempt"] == attempt:
            return Rendezvous(Address(**report.meeting), size)
        time.sleep(0.05)
    raise NodeError(
        f"waited {PATIENCE:.0f} s for rank 0 ({published}): "
        "is the folder on a file system that all nodes share?"
    )


def _listen(address: str) -> socket.socket:
    """Open a socket on a free port, reached under this name only."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    here = str(where[0])
    if here.startswith("127.0.1."):
        # Debian lets a machine call itself so; other nodes know another address of that name.
        logger.warning("%s is %s here: listening on all interfaces", address, here)
        family = socket.AF_INET
        here = ""
    listener = socket.socket(family, kind, protocol)
    listener.bind((here, 0))
    listener.listen(QUEUE)
    return listener
