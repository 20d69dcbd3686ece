"""Place and resources of a job, under the names that profiles, options and the launcher share."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any, Literal, Self

from maect.core.errors import UserError, check_names

RENAMED = {
    "cpus": "cpus_per_task",
    "memory_mb": "mem_mb",
    "minutes": "runtime",
    "partition": "slurm_partition",
    "account": "slurm_account",
    "sbatch": "slurm_extra",
}
"""Names of options in version 0.2.0, and their names now; both are accepted."""
# Refused: each would make the launcher lose its job or wait for the wrong ranks.
RESERVED_SBATCH_OPTIONS = {
    "array", "clusters", "cluster-constraint", "job-name", "output", "error", "open-mode", "signal",
    "wait", "parsable", "test-only", "wrap", "nodes", "ntasks", "ntasks-per-node", "uid", "gid",
    "comment", "a", "M", "J", "o", "e", "W", "N", "n",
}  # fmt: skip
AT_A_COMMA = re.compile(r",(-|[A-Za-z][\w-]*=|$)")
"""Where another option begins behind a comma, as they were separated in version 0.2.0."""
VISIBLE = re.compile("[0-9]|GPU-|MIG-")  # how CUDA names a device; the first other word ends a list


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Place and resources of a job; never part of a result's identity.

    Attributes:
        cluster: start ranks on this machine, or submit a job to SLURM (default local).
        nodes: a number, or a range such as 1..16, of which a training takes what its batch can use.
        devices: ranks per node; auto and gpus: one per GPU, or without GPUs two (auto) or one.
        cpus_per_task: CPUs per rank (auto: an equal share of all).
        mem_mb: memory per node (0: any).
        runtime: wall limit of one job in minutes.
        slurm_partition: partition to submit to.
        slurm_account: account that pays for the job.
        slurm_extra: further sbatch options, such as "--qos=long --constraint=a100".
        setup: script that the compute node sources first.
        python: what ranks run in place of this Python.
    """

    cluster: Literal["local", "slurm"] = "local"
    nodes: int | str = 1
    devices: int | str = 1
    cpus_per_task: int | str = "auto"
    mem_mb: int = 0
    runtime: int = 1440
    slurm_partition: str = ""
    slurm_account: str = ""
    slurm_extra: str = ""
    setup: str = ""
    python: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make it of options by their names; UserError for one that is unknown."""
        given = {RENAMED.get(name, name): value for name, value in options.items()}
        check_names("options", given, [field.name for field in fields(cls)])
        return cls(**given)

    def resolved(self, nodes: int | None = None) -> Self:
        """Return the same in numbers and with full paths, for a job that is about to start.

        Args:
            nodes: of its range; None if it is one number.

        Raises:
            UserError: settings that fit no machine, or that only this machine could answer.
        """
        if self.cluster not in ("local", "slurm"):
            raise UserError(f"cluster {self.cluster!r} is unknown; use 'local' or 'slurm'")
        if self.slurm_account.startswith("$"):
            raise UserError(
                f"--slurm-account {self.slurm_account}: this variable is not set; export it"
            )
        if self.cluster == "slurm":
            self._check_is_for_slurm()
        devices = count_devices(self.devices)
        cpus = self.cpus_per_task
        if cpus == "auto":
            cpus = max(1, len(os.sched_getaffinity(0)) // devices)
        found = replace(
            self,
            nodes=fixed_nodes(self.nodes) if nodes is None else nodes,
            devices=devices,
            cpus_per_task=_number("cpus-per-task", cpus),
            mem_mb=_number("mem-mb", self.mem_mb, least=0),
            runtime=_number("runtime", self.runtime),
            setup=os.path.abspath(self.setup) if self.setup else "",
            python=full_paths(self.python),
        )
        if found.cluster == "local" and found.nodes != 1:
            raise UserError(f"--nodes {found.nodes} needs --cluster slurm")
        if found.cluster == "local" and found.setup:
            raise UserError(
                f"--setup {self.setup} is for SLURM jobs; "
                "here, source it in the shell that you start from"
            )
        return found

    def _check_is_for_slurm(self) -> None:
        for name, value in (("cpus-per-task", self.cpus_per_task), ("devices", self.devices)):
            if not str(value).isdecimal():
                raise UserError(
                    f"--{name} {value} is for this machine; a job on SLURM takes a number"
                )
        for name in sbatch_options(self.slurm_extra):
            if _is_reserved(name.replace("_", "-")):
                raise UserError(
                    f"slurm_extra: {self.slurm_extra}: `{name}` is set by maect, which watches one "
                    "job a step; nodes, devices, runtime and so on are keys of the profile"
                )

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the job."""
        return int(self.nodes) * int(self.devices)

    @property
    def options(self) -> dict[str, str | bool]:
        """Return further sbatch options by name, `gres` among them unless GPUs are named."""
        options = sbatch_options(self.slurm_extra)
        if "no-requeue" not in options:
            options = {"requeue": True, **options}
        if not any(key.startswith("gpus") or key == "gres" for key in options):
            options["gres"] = f"gpu:{self.devices}"
        return options

    @property
    def has_gpus(self) -> bool:
        """Return whether a job with these resources has GPUs."""
        if self.cluster == "local":
            return bool(gpus_here())
        kinds = str(self.options.get("gres", "")).split(",")
        named = any(key.startswith("gpus") for key in self.options)
        return named or any(kind.startswith("gpu") for kind in kinds)

    @property
    def warning_seconds(self) -> int:
        """Return the seconds from the signal to save until the limit: a tenth of it, 20 to 300."""
        return max(20, min(300, self.runtime * 6))


def _number(name: str, value: object, least: int = 1) -> int:
    """Return an option's value as a number; UserError if it is none, or less than `least`."""
    if not str(value).isdecimal() or int(str(value)) < least:
        kind = "a positive number" if least else "a number"
        raise UserError(f"--{name} {value}: must be {kind}")
    return int(str(value))


def _is_reserved(option: str) -> bool:
    """Return whether an option is maect's own; sbatch understands shortened names, too."""
    if len(option) == 1:
        return option in RESERVED_SBATCH_OPTIONS
    return any(reserved.startswith(option) for reserved in RESERVED_SBATCH_OPTIONS)


def sbatch_options(text: str) -> dict[str, str | bool]:
    """Read options of sbatch such as `--qos=A --hold`, also without hyphens, as in `qos=A`.

    Raises:
        UserError: options that are separated otherwise: by commas, or from their values by blanks.
    """
    options: dict[str, str | bool] = {}
    for word in _words("slurm_extra", text):
        name, _, value = word.lstrip("-").partition("=")
        is_value = bool(options) and "=" not in word
        if word[0] != "-" and (is_value or AT_A_COMMA.search(word)):
            raise UserError(f"slurm_extra: {word}: write options as in --qos=A --hold")
        options[name] = value or True
    return options


def _words(name: str, text: str) -> list[str]:
    """Split a text as a shell does; UserError if a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}: {text}: {error}") from None


def full_paths(command: str) -> str:
    """Return a command with the paths of files in full: jobs begin in other folders.

    A word without a `/` is a command's name, whatever lies in the working folder.
    """
    words = _words("python", command)
    return shlex.join(
        os.path.abspath(word) if "/" in word and os.path.isfile(word) else word for word in words
    )


def node_range(nodes: int | str) -> tuple[int, int]:
    """Read a range of nodes: `4` as (4, 4), `1..16` as (1, 16)."""
    match = re.fullmatch(r"([1-9][0-9]*)(?:\.\.([1-9][0-9]*))?", str(nodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise UserError(f"--nodes {nodes}: a number of nodes, or LEAST..MOST such as 1..16")
    return least, most


def fixed_nodes(nodes: int | str) -> int:
    """Return the nodes of a job whose size does not depend on a recipe."""
    least, most = node_range(nodes)
    if least != most:
        raise UserError(f"--nodes {nodes}: a range is for trainings; give one number here")
    return least


def count_devices(devices: int | str) -> int:
    """Count devices: `auto`, the GPUs of this machine, else two processes; `gpus`, else one.

    GPUs that `CUDA_VISIBLE_DEVICES` hides are not there.
    """
    if devices not in ("auto", "gpus"):
        if not str(devices).isdecimal() or not int(devices):
            raise UserError(f"--devices {devices}: a positive number, auto or gpus")
        return int(devices)
    return len(gpus_here()) or (2 if devices == "auto" else 1)


def gpus_here() -> list[str]:
    """Return the model of each GPU here, such as NVIDIA A100 SXM4 40GB; "" where it is unknown.

    GPUs that `CUDA_VISIBLE_DEVICES` hides are left out; the others count as the first one's model.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = takewhile(VISIBLE.match, (visible or "").replace(" ", "").split(","))
    count = len(list(named))
    if visible is not None and not count:
        return []
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30)
        models = [_model(line) for line in asked.stdout.splitlines() if "," in line]
    except (OSError, subprocess.SubprocessError):
        models = []
    if visible is None:
        return models
    first = models[0] if models else ""
    return [first] * count


def _model(line: str) -> str:
    """Return a GPU's model from nvidia-smi's name and MiB of memory; "" if that is unknown."""
    name, mebibytes = line.rsplit(",", 1)
    if not mebibytes.strip().isdecimal():
        return ""
    # The name may say another memory: that of the CPU beside a GH200.
    name = re.sub(r"\b[0-9]+ ?GB?\b", "", name.replace("-", " "))
    return f"{' '.join(name.split())} {round(int(mebibytes) / 1024)}GB"
