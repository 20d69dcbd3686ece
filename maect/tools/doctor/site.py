"""What a cluster profile asks for, read as Snakemake reads it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
import yte
from yte.exceptions import YteError

from maect.core.errors import UserError
from maect.launch import Resources
from maect.launch.nodes import node_range

TRIAL_MINUTES = 15


def read_profile(profile: Path) -> dict[str, dict[str, Any]]:
    """The resources of each rule, with environment variables filled in.

    Raises:
        UserError: no profile there.
    """
    file = profile / "config.yaml"
    try:
        rules = yte.process_yaml(file.read_text(encoding="utf-8"), require_use_yte=True)
        return {
            rule: {key: _fill(value) for key, value in values.items()}
            for rule, values in rules["set-resources"].items()
        }
    except (OSError, yaml.YAMLError, YteError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: not a cluster profile ({error})") from None


def resources(asked: dict[str, Any], nodes: int, count: Callable[[str], int]) -> Resources:
    """A rule's resources on so many nodes; `count` turns `auto` and `gpus` into a number."""
    cluster, cpus = asked.get("cluster", "local"), asked.get("cpus_per_task", "auto")
    devices = count(str(asked.get("devices", 1)))
    here = len(os.sched_getaffinity(0))
    setup = asked.get("setup")
    return Resources(
        cluster=cluster,
        nodes=nodes,
        devices=devices,
        cpus=max(1, here // devices) if cpus == "auto" else int(cpus),
        memory_gb=-(-int(asked.get("mem_mb", 0)) // 1024) or None,
        minutes=int(asked.get("runtime", 1440)),
        partition=asked.get("slurm_partition") or None,
        account=asked.get("slurm_account") or None,
        sbatch=tuple(part for part in str(asked.get("slurm_extra", "")).split(",") if part),
        setup=os.path.abspath(setup) if setup and cluster == "slurm" else None,
    )


def nodes_of(asked: dict[str, Any]) -> tuple[int, int]:
    """Least and most nodes of a rule."""
    return node_range(str(asked.get("nodes", 1)))


def _fill(value: Any) -> Any:
    return os.path.expandvars(value).strip("'") if isinstance(value, str) else value
