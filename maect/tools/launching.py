"""Options of commands that launch a job: where it runs, and with which resources."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from cyclopts import Group, Parameter

from maect.core.errors import UserError, check_names

if TYPE_CHECKING:
    from maect.launch import Resources


@Parameter(name="*", group=Group("Place and resources"))
@dataclass(frozen=True, kw_only=True)
class Launching:
    """Place and resources of a job.

    Attributes:
        cluster: start ranks on this machine, or submit a job to SLURM (default local).
        nodes: a number, or a range such as 1..16, of which a training takes what its batch can use.
        devices: ranks per node; auto and gpus: one per GPU, or without GPUs two (auto) or one.
        cpus: CPUs per rank (auto: an equal share of all).
        memory_mb: memory per node (0: any).
        minutes: wall limit of one job.
        partition: of SLURM.
        account: of SLURM, to which the job is charged.
        sbatch: further sbatch options, KEY=VALUE,KEY=VALUE.
        setup: script that the compute node sources first.
        python: what ranks run in place of this Python.
        detach: leave the job running on Ctrl-C.
        log: also write messages to this file.
    """

    cluster: Literal["local", "slurm"] = "local"
    nodes: str = "1"
    devices: str = "1"
    cpus: str = "auto"
    memory_mb: int = 0
    minutes: int = 1440
    partition: str = ""
    account: str = ""
    sbatch: str = ""
    setup: str = ""
    python: str = ""
    detach: bool = False
    log: Path | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make it of options by their names, whose numbers may be numbers."""
        check_names("options", options, [field.name for field in fields(cls)])
        words = {k: str(v) for k, v in options.items() if k in ("nodes", "devices", "cpus")}
        return cls(**dict(options) | words)

    def resources(self, nodes: int) -> "Resources":
        """Return the resources of a job on so many nodes.

        Raises:
            UserError: settings that fit no machine, or that only this machine could answer.
        """
        from maect.launch.resources import Resources, count_devices, full_paths, sbatch_arguments

        if self.account.startswith("$"):
            raise UserError(f"--account {self.account}: this variable is not set; export it")
        if self.cluster == "slurm":
            for name, value in (("cpus", self.cpus), ("devices", self.devices)):
                if not value.isdecimal():
                    raise UserError(
                        f"--{name} {value} is for this machine; a job on SLURM takes a number"
                    )
        if self.cpus != "auto" and not self.cpus.isdecimal():
            raise UserError(f"--cpus {self.cpus}: a positive number, or auto")
        devices = count_devices(self.devices)
        share = max(1, len(os.sched_getaffinity(0)) // devices)
        return Resources(
            cluster=self.cluster,
            nodes=nodes,
            devices=devices,
            cpus=share if self.cpus == "auto" else int(self.cpus),
            memory_mb=int(self.memory_mb) or None,
            minutes=int(self.minutes),
            partition=self.partition or None,
            account=self.account or None,
            sbatch=sbatch_arguments(self.sbatch),
            setup=os.path.abspath(self.setup) if self.setup else None,
            python=full_paths(self.python) or None,
        )


LOCAL = Launching()
"""This machine, one rank."""
