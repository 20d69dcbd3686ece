"""What to run and what to run it on."""

import json
from dataclasses import dataclass, field
from typing import Any

from maect.core.errors import UserError


class LaunchError(UserError):
    """A job that cannot be started or that ended for good without its result."""


@dataclass(frozen=True)
class Task:
    """The function that every rank calls, by name, so that nothing heavy is imported to start it.

    Attributes:
        function: `package.module:function`; called as `function(context=..., **arguments)`.
        arguments: keyword arguments; they travel as JSON.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not (module and name):
            raise ValueError(f"task function {self.function!r} is not 'package.module:function'")
        if json.loads(json.dumps(self.arguments)) != self.arguments:
            raise ValueError(f"{self.function}: arguments change on the way through JSON")


@dataclass(frozen=True)
class Resources:
    """Cluster settings; never part of a result's identity.

    Attributes:
        cluster: "local" (processes on this machine) or "slurm".
        nodes: whole jobs span this many nodes.
        devices: ranks per node: one per GPU, or CPU processes where there is no GPU.
        cpus: CPUs per rank.
        memory_gb: memory per node in GB; None leaves it to the site.
        minutes: wall limit of one job; the ranks are told to save a little before.
        partition: SLURM partition.
        account: SLURM account.
        sbatch: further "key=value" (or "key") sbatch arguments. `gres=gpu:DEVICES` is asked for
            unless one of these names the GPUs itself; "gres=none" asks for none (CPU partitions).
        setup: script that the compute node sources before anything else (`envs/SITE.sh`).
    """

    cluster: str = "local"
    nodes: int = 1
    devices: int = 1
    cpus: int = 1
    memory_gb: int | None = None
    minutes: int = 1440
    partition: str | None = None
    account: str | None = None
    sbatch: tuple[str, ...] = ()
    setup: str | None = None

    def __post_init__(self) -> None:
        if self.cluster not in ("local", "slurm"):
            raise UserError(f"cluster {self.cluster!r} is unknown; use 'local' or 'slurm'")
        for name in ("nodes", "devices", "cpus", "minutes", "memory_gb"):
            value = getattr(self, name)
            if name == "memory_gb" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise UserError(f"resources: {name}={value!r} must be a whole number above zero")
        if self.cluster == "local" and self.nodes != 1:
            raise UserError(f"resources: nodes={self.nodes} needs cluster='slurm'")
        if self.cluster == "local" and self.setup:
            raise UserError(
                f"resources: setup={self.setup} is for SLURM jobs; "
                "here, source it in the shell that you start from"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.devices

    @property
    def warning_seconds(self) -> int:
        """Seconds between the signal to save and the wall limit: a tenth of it, 20 to 300."""
        return max(20, min(300, self.minutes * 6))
