"""Options of commands that launch a job: where it runs, and with which resources."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from cyclopts import Group, Parameter

from maect.core.errors import UserError, check_names

if TYPE_CHECKING:
    from maect.launch import Resources

# Operations that a step must leave to each rank: about 90 ms of an A100. With less, what a step
# costs on any number of ranks (gradients, launches) soon is most of it: docs/scaling.md.
WORTH_A_RANK = 1e13
WALL_MINUTES = 1440
AT_A_COMMA = re.compile(r",(-|[A-Za-z][\w-]*=|$)")
"""Where another option begins behind a comma, as they were separated in version 0.2.0."""


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
        sbatch: further sbatch options, such as "--qos=long --constraint=a100".
        setup: script that the compute node sources first.
        python: what ranks run in place of this Python.
        log: also write messages to this file.
    """

    cluster: Literal["local", "slurm"] = "local"
    nodes: str = "1"
    devices: str = "1"
    cpus: str = "auto"
    memory_mb: int = 0
    minutes: int = WALL_MINUTES
    partition: str = ""
    account: str = ""
    sbatch: str = ""
    setup: str = ""
    python: str = ""
    log: Path | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make it of options by their names, whose numbers may be numbers."""
        check_names("options", options, [field.name for field in fields(cls)])
        words = {k: str(v) for k, v in options.items() if k in ("nodes", "devices", "cpus")}
        return cls(**dict(options) | words)

    def resources(self, nodes: int) -> "Resources":
        """Return the resources of a job on `nodes` nodes.

        Raises:
            UserError: settings that fit no machine, or that only this machine could answer.
        """
        from maect.launch import Resources

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


def full_paths(command: str) -> str:
    """Return a command with the paths of files in full: jobs begin in other folders.

    A word without a `/` is a command's name, whatever lies in the working folder.
    """
    words = shlex.split(command)
    return shlex.join(
        os.path.abspath(word) if "/" in word and os.path.isfile(word) else word for word in words
    )


def sbatch_arguments(text: str) -> tuple[str, ...]:
    """Split options of sbatch, which are separated by blanks; UserError if they are by commas."""
    options = tuple(word.removeprefix("--") for word in shlex.split(text))
    for option in options:
        # The value of `export` has this form.
        if AT_A_COMMA.search(option) and not option.startswith("export="):
            raise UserError(f"slurm_extra: {option}: separate options by blanks: --qos=A --hold")
    return options


def count_devices(devices: str) -> int:
    """Count devices: `auto`, the GPUs of this machine, else two processes; `gpus`, else one.

    GPUs that `CUDA_VISIBLE_DEVICES` hides are not there.
    """
    from maect.launch.resources import gpus_here

    if devices not in ("auto", "gpus"):
        if not devices.isdecimal() or not int(devices):
            raise UserError(f"--devices {devices}: a positive number, auto or gpus")
        return int(devices)
    return len(gpus_here()) or (2 if devices == "auto" else 1)


def node_range(nodes: str) -> tuple[int, int]:
    """Read a range of nodes: `4` as (4, 4), `1..16` as (1, 16)."""
    match = re.fullmatch(r"([1-9][0-9]*)(?:\.\.([1-9][0-9]*))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise UserError(f"--nodes {nodes}: a number of nodes, or LEAST..MOST such as 1..16")
    return least, most


def fixed_nodes(nodes: str) -> int:
    """Return the nodes of a job whose size does not depend on a recipe."""
    least, most = node_range(nodes)
    if least != most:
        raise UserError(f"--nodes {nodes}: a range is for trainings; give one number here")
    return least


def training_nodes(
    nodes: str, devices: int, batch_size: int, step_flops: float, speed: float = 1.0
) -> int:
    """Return the nodes for a training: as many of the range as its batch is worth.

    That is the largest number with which the ranks divide the batch evenly and each has
    `WORTH_A_RANK` of the step's operations, times the speed relative to an A100's; else the
    smallest that divides it.

    Raises:
        UserError: no number of the range divides the batch.
    """
    least, most = node_range(nodes)
    fitting = [n for n in range(least, most + 1) if batch_size % (n * devices) == 0]
    if not fitting:
        many = f"{least * devices} ranks" if least == most else f"ranks on {nodes} nodes"
        raise UserError(f"batch_size {batch_size} is not a multiple of {many}")
    worth = [n for n in fitting if step_flops / (n * devices) >= WORTH_A_RANK * speed]
    return max(worth, default=min(fitting))
