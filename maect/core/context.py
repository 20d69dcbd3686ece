"""What a launched function is given of its place among the ranks."""

from typing import Any, Protocol


class Context(Protocol):
    """One rank of a job, as `maect.launch` hands it out."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    cpus: int

    def stop_requested(self) -> bool:
        """Whether this rank was told to save and return."""

    def report(self, progress: dict[str, Any], /) -> None:
        """Show how far the job is."""

    def fail(self, error: BaseException) -> None:
        """End this rank at once with an error, from beside a main thread that is stuck."""
