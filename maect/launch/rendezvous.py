"""Store in which a job's ranks meet.

submitit's `TorchDistributedEnvironment` is not used: it derives the port from the job's id, which
two local jobs or two clusters may share, gives a requeued job the same one again, and knows nothing
of a site's MASTER_ADDR.

Torch's TCPStore asks nobody for a password (`docs/reference/other_users.md`). So the ranks of one
node meet in a file in a folder that only this user can enter. Those of several nodes need a port.
"""

import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from maect.core.errors import NodeError
from maect.launch.record import RankReport

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 600.0  # seconds; the nodes of a large job start minutes apart


def open_store(size: int, nodes: int, timeout: timedelta) -> tuple["Store", str]:
    """Open the store of rank 0 for `size` ranks; return it, and its address for the others."""
    from torch.distributed import TCPStore

    if nodes == 1:
        file = f"{tempfile.mkdtemp(prefix='maect-')}/store"  # for this user alone
        return connect(file, size, timeout), file
    host = os.environ["MASTER_ADDR"]
    store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def connect(address: str, size: int, timeout: timedelta) -> "Store":
    """Connect to the store at an address: a file, or HOST:PORT."""
    from torch.distributed import FileStore, TCPStore

    if _is_file(address):
        store = FileStore(address, size)
        store.set_timeout(timeout)  # else five minutes
        return store
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), size, timeout=timeout, wait_for_workers=False)


def find_address(published: Path, attempt: int) -> str:
    """Wait for the address in rank 0's report of this attempt; NodeError if it does not come.

    Ranks of an attempt before this one may live on, cut off from SLURM.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        report = RankReport.read(published)
        if report and report.attempt == attempt and report.address:
            return report.address
        time.sleep(0.05)
    raise NodeError(
        f"waited {PATIENCE:.0f} s for rank 0 ({published}): "
        "is the folder on a file system that all nodes share?"
    )


def remove_store(address: str) -> None:
    """Remove the folder of the file in which the ranks met."""
    if _is_file(address):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _is_file(address: str) -> bool:
    return address.startswith("/")
