"""What can be checked on the login node, without a job."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maect.experiment import Experiment
from maect.launch import Resources
from maect.launch.squeue import command
from maect.launch.submit import slurm
from maect.tools.doctor.findings import Finding
from maect.tools.doctor.site import nodes_of, resources
from maect.tools.plan.text import size_text
from maect.tools.plan.work import feature_bytes, shards

PACKAGES = ("torch", "deepspeed", "submitit", "snakemake", "safetensors", "timm")
FILES_PER_RUN = 200  # states of many ranks, logs, TensorBoard, jobs
FLAGS = {"ntasks_per_node": "ntasks-per-node", "cpus_per_task": "cpus-per-task"}


def software() -> list[Finding]:
    """Python, the packages of the lock file, what is optional, the native decoder."""
    here = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    hint = "" if fits else "load a module of Python 3.11 to 3.13 and `make install PYTHON=...`"
    out = [Finding("ok" if fits else "FAIL", f"python {here} ({sys.executable})", hint)]
    for package in PACKAGES:
        try:
            out.append(Finding("ok", f"{package} {version(package)}"))
        except PackageNotFoundError:
            hint = "`make install` on a node with internet"
            out.append(Finding("FAIL", f"{package} is not installed", hint))
    flash = importlib.util.find_spec("flash_attn") is not None
    out.append(
        Finding("note", "flash-attn is installed" if flash else "no flash-attn: SDPA is used")
    )
    from maect.data.decode import decoder_name

    name = decoder_name()
    built = name.startswith("native")
    hint = "" if built else "python -m maect.data.native.build says what is missing; works without"
    return [*out, Finding("note", f"JPEG decoder: {name}", hint)]


def setup_script(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Whether the scripts that jobs source exist and end well."""
    out = []
    for script in dict.fromkeys(
        str(asked["setup"]) for asked in rules.values() if asked.get("setup")
    ):
        if not Path(script).exists():
            hint = "correct `setup` in the profile, or start in the project's folder"
            out.append(Finding("FAIL", f"setup script {script} does not exist", hint))
            continue
        done = subprocess.run(["bash", "-c", f"source {script}"], capture_output=True, text=True)
        said = " ".join(done.stderr.split())[:200]
        if done.returncode:
            hint = "each job would end there: correct the script"
            out.append(Finding("FAIL", f"setup script {script} fails: {said}", hint))
        else:
            what = f"setup script {script}" + (f" says: {said}" if said else "")
            out.append(Finding("note" if said else "ok", what))
    return out


def requests(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Whether SLURM would take a job of each kind (`sbatch --test-only`)."""
    if shutil.which("sbatch") is None:
        hint = "start on a login node of the cluster"
        return [Finding("FAIL", "no sbatch here", hint)]
    groups: dict[tuple[str, ...], tuple[Resources, list[str], bool]] = {}
    for rule, asked in rules.items():
        account = str(asked.get("slurm_account", ""))
        if account.startswith("$"):
            hint = f"export {account[1:]}=... in this shell, and where you start Snakemake"
            return [Finding("FAIL", f"account {account} is not set", hint)]
        least, most = nodes_of(asked)
        for nodes in sorted({least, most}):
            wanted = resources(asked, nodes, int)
            words = _sbatch(wanted)
            # What one rule cannot do without is no upper end of a range, whoever else asks for it.
            _, rules_so_far, optional = groups.get(words, (wanted, [], True))
            groups[words] = (wanted, [*rules_so_far, rule], optional and nodes > least)
    return [_request(words, *group) for words, group in groups.items()]


def _request(
    words: tuple[str, ...], wanted: Resources, rules: list[str], is_the_most: bool
) -> Finding:
    code, _, said = command("sbatch", "--test-only", *words, "--wrap", "true")
    place = wanted.partition or "the default partition"
    what = (
        f"{wanted.nodes} x {wanted.devices} devices in {place}"
        f" for {wanted.minutes} min, account {wanted.account or 'default'} ({', '.join(rules)})"
    )
    if code == 0:
        return Finding("ok", what)
    reason = (
        said.splitlines()[-1].removeprefix("allocation failure: ") if said else f"status {code}"
    )
    if is_the_most:
        return Finding("note", f"not so many: {what}: {reason}", "end the range of `nodes` earlier")
    hint = "correct partition, account, runtime, devices or slurm_extra of these rules"
    return Finding("FAIL", f"{what}: {reason}", hint)


def _sbatch(wanted: Resources) -> tuple[str, ...]:
    """The launcher's own parameters as options of sbatch."""
    parameters = slurm(wanted, "maect-doctor", Path("doctor"))
    keys = ("partition", "account", "time", "nodes", "ntasks_per_node", "cpus_per_task", "mem")
    asked = {key: parameters[key] for key in keys} | parameters["additional_parameters"]
    return tuple(
        f"--{FLAGS.get(key, key)}" + ("" if value is True else f"={value}")
        for key, value in asked.items()
        if value is not None
    )


def storage(experiment: Experiment) -> list[Finding]:
    """Room for what the experiment will leave, and the right to write it."""
    place = experiment.root.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        hint = "set `storage` in the experiment to a folder of yours that all nodes share"
        return [Finding("FAIL", f"{place}: cannot write ({error.strerror})", hint)]
    size, files = _needs(experiment)
    system = os.statvfs(place)
    free, inodes = system.f_bavail * system.f_frsize, system.f_favail
    hint = "make room, or set `storage` in the experiment to a larger file system"
    out = [
        Finding("ok", f"{place}: {size_text(free)} free, about {size_text(size)} needed")
        if free > size
        else Finding(
            "FAIL", f"{place}: {size_text(free)} free, about {size_text(size)} needed", hint
        )
    ]
    if not system.f_files:
        return [*out, Finding("note", f"{place}: does not say how many files it can take")]
    what = f"{place}: {inodes:,} more files possible, about {files:,} needed"
    return [*out, Finding("ok", what) if inodes > files else Finding("FAIL", what, hint)]


def _needs(experiment: Experiment) -> tuple[int, int]:
    """Bytes and files of the whole experiment, near enough; shards that exist cost nothing."""
    size, files = 0, FILES_PER_RUN * len(experiment.runs)
    for name, dataset in experiment.datasets.items():
        for split, given in dataset.splits.items():
            known = shards(experiment.shards(name, split))
            if not known.written:
                size += known.bytes or 0
                files += 4 * given.shards
    for run in experiment.runs.values():
        size += run.settings.state_bytes(run.encoder)
    for name in experiment.evaluated:
        for split in ("train", "val"):
            images = shards(experiment.shards(experiment.default_dataset, split)).images or 0
            size += feature_bytes(experiment.runs[name].encoder, images)
    return size, files + 10 * len(experiment.evaluations)
