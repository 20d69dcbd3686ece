"""One rank of a job, as a launched function is given it."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store


class Context:
    """One rank of a job: the only one, in this process, that nobody watches.

    `maect.launch` hands out a `maect.launch.worker.Rank`, which overrides all of it.

    Attributes:
        cpus: threads that it may use.
        gpus: whether the job was given GPUs: then it does not go on without.
        began: monotonic time since when this process holds its device.
    """

    began: float = time.monotonic()  # when this is imported

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0

    def __init__(self, cpus: int = 1, gpus: bool = False) -> None:
        self.cpus = cpus
        self.gpus = gpus

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and return."""
        return False

    def is_current(self) -> bool:
        """Return whether the launcher's record still names this job, as far as that can be read."""
        return True

    def report(self, progress: dict[str, Any], /) -> None:
        """Show how far the job is."""

    def say(self, message: str, /) -> None:
        """Tell people a sentence, in the launcher's terminal."""

    def saved(self, step: int, /) -> None:
        """Tell the launcher that the state of this step is complete on disk.

        Only that counts as progress when it is decided whether another attempt is worth it.
        """

    def store(self, timeout: timedelta, /) -> "Store":
        """Return the TCPStore or file store in which this job's ranks meet."""
        from torch.distributed import HashStore

        return HashStore()

    def fail(self, error: BaseException) -> None:
        """End this rank at once with an error, from a thread other than a stuck main thread."""
        raise error
