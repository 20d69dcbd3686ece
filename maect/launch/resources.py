"""A task to run, and the nodes and devices for it."""

import os
import re
import subprocess
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from maect.core.errors import UserError

VISIBLE = re.compile("[0-9]|GPU-|MIG-")  # how CUDA names a device; the first other word ends a list


# Refused: each would make the launcher lose its job or wait for the wrong ranks.
RESERVED_SBATCH_OPTIONS = {
    "array", "clusters", "cluster-constraint", "job-name", "output", "error", "open-mode", "signal",
    "wait", "parsable", "test-only", "wrap", "nodes", "ntasks", "ntasks-per-node", "uid", "gid",
    "a", "M", "J", "o", "e", "W", "N", "n",
}  # fmt: skip


class LaunchError(UserError):
    """A job that cannot be started or that ended for good without its result."""


@dataclass(frozen=True)
class Task:
    """Function that every rank calls, by name, so that a start imports nothing heavy.

    Attributes:
        function: `package.module:function`; called as `function(context=..., **arguments)`.
        arguments: keyword arguments; they travel as JSON.
        identity: of the result that they ask for: a live job of another one is not waited for.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True)
class Resources:
    """Cluster settings; never part of a result's identity.

    Attributes:
        cluster: "local" (processes on this machine) or "slurm".
        devices: ranks per node: one per GPU, or CPU processes where there is no GPU.
        cpus: CPUs per rank.
        memory_mb: memory per node in MB; None leaves it to the site.
        minutes: wall limit of one job; the ranks are asked to save a little before.
        sbatch: further sbatch options, "key=value" or "key". `gres=gpu:DEVICES` is asked for
            unless one of these names the GPUs itself; "gres=none" asks for none (CPU partitions).
        setup: script that the compute node sources before anything else (`envs/SITE.sh`).
        python: command that ranks run in place of this Python, such as one in a container.
    """

    cluster: str = "local"
    nodes: int = 1
    devices: int = 1
    cpus: int = 1
    memory_mb: int | None = None
    minutes: int = 1440
    partition: str | None = None
    account: str | None = None
    sbatch: tuple[str, ...] = ()
    setup: str | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        if self.cluster not in ("local", "slurm"):
            raise UserError(f"cluster {self.cluster!r} is unknown; use 'local' or 'slurm'")
        for name in ("nodes", "devices", "cpus", "minutes", "memory_mb"):
            value = getattr(self, name)
            if name == "memory_mb" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise UserError(f"resources: {name}={value!r} must be a positive integer")
        for argument in self.sbatch:
            name = argument.partition("=")[0].strip().lstrip("-").replace("_", "-")
            if name in RESERVED_SBATCH_OPTIONS:
                raise UserError(
                    f"slurm_extra: {argument}: `{name}` is set by maect, which watches one job a "
                    "step; nodes, devices, runtime and so on are keys of the profile"
                )
        if self.cluster == "local" and self.nodes != 1:
            raise UserError(f"resources: nodes={self.nodes} needs cluster='slurm'")
        if self.cluster == "local" and self.setup:
            raise UserError(
                f"resources: setup={self.setup} is for SLURM jobs; "
                "here, source it in the shell that you start from"
            )

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the job."""
        return self.nodes * self.devices

    @property
    def options(self) -> dict[str, Any]:
        """Return further sbatch options by name, `gres` among them unless GPUs are named."""
        options: dict[str, Any] = {"requeue": True}
        for argument in self.sbatch:
            key, _, value = argument.partition("=")
            options[key.strip().lstrip("-")] = value.strip() or True
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
        return max(20, min(300, self.minutes * 6))


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
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
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
