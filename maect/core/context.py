"""One rank of a job, as a launched function is given it."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store


class Context(Protocol):
    """One rank of a job, as `maect.launch` hands it out."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    cpus: int
    gpus: bool
    """Whether the job was given GPUs: then it does not go on without."""

    saved_before: int
    """Last step that is saved according to the launcher's record, or 0."""

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and return."""

    def is_current(self) -> bool:
        """Return whether the launcher's record still names this job, as far as that can be read."""

    def report(self, progress: dict[str, Any], /) -> None:
        """Show how far the job is."""

    def say(self, message: str, /) -> None:
        """Tell people a sentence, in the launcher's terminal."""

    def saving(self, writes: bool, /) -> None:
        """Tell the launcher whether a state is being written, which it waits for before a kill."""

    def saved(self, step: int, /) -> None:
        """Tell the launcher that the state of this step is complete on disk.

        Only that counts as progress when it is decided whether another attempt is worth it.
        """

    def held_seconds(self) -> float:
        """Seconds x ranks for which this job and those before it have held their devices."""

    def store(self, timeout: timedelta, /) -> "Store":
        """The store in which the ranks' process group meets, closed to everybody else."""

    def fail(self, error: BaseException) -> None:
        """End this rank at once with an error, from beside a main thread that is stuck."""


class SingleRank:
    """The only rank of a job that nobody watches, in this process.

    Attributes:
        cpus: threads that it may use.
        gpus: whether it was given GPUs.
        patience: how often it may ask before it is asked to stop; none: it never is.
    """

    rank = local_rank = node = 0
    world_size = local_world_size = 1
    saved_before = 0

    def __init__(self, cpus: int = 1, gpus: bool = False, patience: int | None = None) -> None:
        self.cpus, self.gpus, self.patience = cpus, gpus, patience

    def stop_requested(self) -> bool:
        """Return whether it was asked more often than its patience allows."""
        if self.patience is not None:
            self.patience -= 1
        return self.patience is not None and self.patience < 0

    def is_current(self) -> bool:
        """Return True: no other job can take its work over."""
        return True

    def report(self, *_: object) -> None:
        """Tell nobody."""

    say = saving = saved = report

    def held_seconds(self) -> float:
        """Return 0: no device is held."""
        return 0.0

    def store(self, timeout: timedelta, /) -> "Store":
        """A store in this process."""
        from torch.distributed import HashStore

        return HashStore()

    def fail(self, error: BaseException) -> None:
        """Raise the error."""
        raise error
