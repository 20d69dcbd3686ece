"""Where the ranks of a job meet: rank 0's address and a port that parallel jobs do not share."""

import fcntl
import json
import os
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import IO

from maect.core.errors import UserError
from maect.core.files import write_json

# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection takes one.
PORTS = range(20000, 30000)
PATIENCE = 600.0  # seconds; the nodes of a large job start minutes apart

_lock_file: list[IO[str]] = []  # opened once: closing any copy would drop the locks
_held: set[int] = set()


def meet(jobs: Path, attempt: int, rank: int, hosts: list[str]) -> tuple[str, int]:
    """Rank 0 publishes (address, port) in the job's folder, the other ranks wait for it.

    The address is 127.0.0.1 on one node. On several it is the first node's name, unless the site's
    script has set MASTER_ADDR (the name of the fast interface).
    """
    file = jobs / f"rendezvous-{attempt}.json"
    if rank == 0:
        address = "127.0.0.1" if len(hosts) == 1 else os.environ.get("MASTER_ADDR") or hosts[0]
        port = free_port()
        write_json(file, [address, port])
        return address, port
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            address, port = json.loads(file.read_text(encoding="utf-8"))
            return address, port
        except (OSError, ValueError):
            time.sleep(0.05)
    raise UserError(
        f"rank {rank} waited {PATIENCE:.0f} s for rank 0 ({file}): "
        "is the folder on a file system that all nodes share?"
    )


def free_port() -> int:
    """A port that nothing listens on, reserved among this user's jobs until this process ends.

    It stays closed for the seconds until the caller binds it; the lock keeps our own jobs away.
    """
    if not _lock_file:
        path = Path(tempfile.gettempdir()) / f"maect-ports-{os.getuid()}.lock"
        _lock_file.append(path.open("a"))
    # Not the global generator: a training seed would send all jobs to the same port.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if port in _held:
            continue
        try:
            # One byte of the lock file for each port; the kernel frees it with the process.
            fcntl.lockf(_lock_file[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            continue
        _held.add(port)
        return port
    raise UserError(f"no free TCP port between {PORTS.start} and {PORTS.stop} on this machine")
