"""Cluster profiles by kind of job: a site lists only its differences from the SLURM profile.

Snakemake reads a profile through YTE, so that it may call these functions: they make Snakemake's
`set-resources` and `set-threads`, rule by rule, of what it says by kind of job.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from maect.core.errors import UserError, did_you_mean
from maect.core.files import PIPELINE
from maect.core.owners import why_public
from maect.core.resources import Resources
from maect.core.yaml_files import read_mapping
from maect.evaluate import PROTOCOLS
from maect.stages import STAGES

PROFILES = PIPELINE / "cluster_profiles"
SLURM = PROFILES / "slurm/config.yaml"
# From large to small: each asks for what the one before it does, unless the profile says otherwise.
KINDS = ("training", "node", "device", "cpu")
HERE = ("write_shards", "import")
"""Rules that run where Snakemake does, of which a profile may say `threads`."""
PLACE = {field.name: field.default for field in fields(Resources)}
"""A rule's resources in a profile, each also an option of `maect`: for one machine by default."""
OF_TRAININGS = {"gpu": "", "save_every_minutes": 2, "stage_to": ""}
"""The same, of trainings only."""
CLUSTER = PLACE | OF_TRAININGS
"""Resources of a rule that computes, which `set-resources` of a profile sets.

The shell command reads them, not `params`, so that changing them re-runs nothing.
"""
Jobs = Mapping[str, Mapping[str, Any]]


def find_profile(name_or_path: str) -> Path:
    """Find a profile's folder by its name or path; `cluster_profiles/NAME` works from anywhere.

    A name without a `/` is one of the pipeline's: whatever the working folder has of that name, a
    profile may run code.

    Raises:
        UserError: there is no such profile, every user could write it, or it says `config`, which
            `--config` replaces.
    """
    known = PROFILES / name_or_path
    folders = (Path(name_or_path), PIPELINE / name_or_path) if "/" in name_or_path else (known,)
    for folder in folders:
        if (folder / "config.yaml").is_file():
            if reason := why_public(folder / "config.yaml"):
                raise UserError(f"--profile {name_or_path}: {reason}")
            if "config" in read_mapping(folder / "config.yaml", "profile"):
                raise UserError(
                    f"{folder / 'config.yaml'}: config: maect does not read it there; remove it, "
                    "and write --config KEY=VALUE"
                )
            return folder
    names = sorted(file.parent.name for file in PROFILES.glob("*/config.yaml"))
    if (Path(name_or_path) / "config.yaml").is_file():
        hint = f"the one in this folder is --profile ./{name_or_path}"
    else:
        hint = did_you_mean(Path(name_or_path).name, names)
    raise UserError(f"--profile {name_or_path}: no such profile; {hint}")


def on_devices(command: str, trains: bool = False) -> str:
    """Return a shell command that runs a `maect` command where the profile says."""
    words = [
        f"--{name.replace('_', '-')}={{resources.{name}:q}}"
        for name in (CLUSTER if trains else PLACE)
    ]
    return " ".join([command, *words, "--log {log:q}"])


def kinds() -> dict[str, str]:
    """Return the kind of job of every rule that computes."""
    kind_of = {"features": "node"}
    for name, protocol in PROTOCOLS.items():
        alone = "device" if protocol.encoder_input else "cpu"
        kind_of[name] = "node" if protocol.every_rank else alone
    return kind_of | {name: "training" for name, stage in STAGES.items() if stage.trains}


def by_rule(jobs: Jobs) -> dict[str, dict[str, dict[str, Any]]]:
    """Return Snakemake's `set-resources` and `set-threads` of rules; UserError for unknown jobs.

    `jobs` has resources by kind of job (`KINDS`) or rule; `threads` is a rule's share of the cores.
    """
    kind_of = kinds()
    asked = dict[str, Mapping[str, Any]]()
    for name in jobs:
        if name not in {*KINDS, *kind_of, *HERE}:
            hint = did_you_mean(name, [*KINDS, *kind_of])
            raise UserError(f"cluster profile: unknown job {name!r}; {hint}")
    larger: Mapping[str, Any] = {}
    for kind in KINDS:
        larger = {**larger, **jobs.get(kind, {})}
        asked |= {rule: larger for rule, its_kind in kind_of.items() if its_kind == kind}
    asked |= {name: {**asked.get(name, {}), **jobs[name]} for name in jobs if name not in KINDS}
    resources = {
        rule: {key: _found(key, value) for key, value in values.items() if key != "threads"}
        for rule, values in asked.items()
    }
    return {
        "set-resources": {rule: values for rule, values in resources.items() if values},
        "set-threads": {r: values["threads"] for r, values in asked.items() if "threads" in values},
    }


def _found(key: str, value: Any) -> Any:
    """Return a profile's content, with the pipeline's own scripts by their full paths.

    Names are quoted: Snakemake evaluates resources, and a partition `all` is a function of Python.
    """
    if key in ("slurm_partition", "slurm_account", "slurm_extra") and isinstance(value, str):
        is_quoted = len(value) > 1 and value[0] == value[-1] == "'" and value.count("'") == 2
        return repr(value[1:-1] if is_quoted else value)
    if key not in ("setup", "python"):
        return value

    def full(word: re.Match[str]) -> str:
        path = PIPELINE / word[0]
        # Escaped, not in quotes, which Snakemake would take for those of its own expressions.
        return re.sub(r"(\s)", r"\\\1", str(path)) if path.is_file() else word[0]

    if key == "setup":
        return str(PIPELINE / value) if value and (PIPELINE / value).is_file() else value
    return re.sub(r"[^\s/]+/\S+", full, str(value))


def like_slurm(jobs: Jobs) -> dict[str, Any]:
    """Return all options of the common SLURM profile, with a site's jobs in place of its own.

    What is usual for a rule is cut to the wall limit that the site says for its kind of job.
    """
    common = yaml.safe_load(SLURM.read_text(encoding="utf-8"))
    wall: float = math.inf
    walls = dict[str, float]()
    for kind in KINDS:
        wall = jobs.get(kind, {}).get("runtime") or wall
        walls[kind] = wall
    walls |= {rule: walls[kind] for rule, kind in kinds().items()}
    usual: Jobs = {
        name: {**values, "runtime": min(walls[name], values["runtime"])}
        if "runtime" in values
        else values
        for name, values in common["__variables__"]["jobs"].items()
    }
    options = {key: value for key, value in common.items() if key[:2] != "__" and key != "<"}
    names = dict.fromkeys((*usual, *jobs))
    return options | by_rule(
        {name: {**usual.get(name, {}), **jobs.get(name, {})} for name in names}
    )
