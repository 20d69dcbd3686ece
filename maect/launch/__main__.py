"""One rank of a job on this machine: `python -P -m maect.launch FOLDER NAME RANK RANKS`."""

import sys
from pathlib import Path

from maect.launch import worker

if __name__ == "__main__":
    rank, ranks = map(int, sys.argv[3:])
    worker.start(
        Path(sys.argv[1]), sys.argv[2], ["localhost"],
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, node=0,
    )  # fmt: skip
