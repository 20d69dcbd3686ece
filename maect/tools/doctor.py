"""`maect doctor`: whether a site is ready for an experiment, each fault with a hint."""

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import yaml
import yte
from yte.exceptions import YteError

from maect.core.errors import UserError, counted
from maect.core.files import read_json
from maect.experiment import Experiment
from maect.experiment.profile import PROFILE, PROFILE_OF_TRAININGS
from maect.experiment.resolve import features_file, features_read
from maect.launch import LaunchError, Resources, Task, launch, submit
from maect.launch.resources import node_range
from maect.launch.slurm import command
from maect.records import is_finished
from maect.tools.plan import feature_bytes, shards_of
from maect.tools.plan_text import size_text

PACKAGES = ("torch", "deepspeed", "submitit", "snakemake", "safetensors", "timm")
FILES_PER_RUN = 200  # states of many ranks, logs, TensorBoard, jobs
SNAKEMAKES = ("mem_mib",)
"""Resources of Snakemake's own that are called nearly as one of ours."""
FLAGS = {"ntasks_per_node": "ntasks-per-node", "cpus_per_task": "cpus-per-task"}
TRIAL_MINUTES = 15
DRIVERS = {12: 525, 13: 580}
"""NVIDIA's driver that each CUDA needs."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; a "note" is neither good nor bad; `hint` is the cure."""

    kind: Literal["ok", "note", "FAIL"]
    what: str
    hint: str = ""


def result_of_check(holds: bool, what: str, hint: str, fault: str = "") -> Finding:
    """Return the line of a check: ok, or its `fault` (else `what` again) with a hint."""
    return Finding("ok", what) if holds else Finding("FAIL", fault or what, hint)


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return the lines of a report: each finding, and its hint below it."""
    out = []
    for finding in findings:
        out.append(f"{finding.kind:<5}{finding.what}")
        if finding.hint:
            out.append(f"     hint: {finding.hint}")
    return out


def doctor(experiment: Experiment, profile: Path, try_job: bool) -> None:
    """Check a site and print a line for each check.

    The job needs what the other checks read: it runs only if none of them failed.

    Raises:
        UserError: how many checks failed.
    """
    findings: list[Finding] = []

    def note(more: list[Finding]) -> None:
        findings.extend(more)
        print(*lines(more), sep="\n", flush=True)

    rules = read_profile(profile)
    trainings = (run.stage for run in experiment.runs.values() if run.settings.trains)
    largest = rules.get(next(trainings, "features"), {})
    on_slurm = largest.get("cluster") == "slurm"
    note([*software(), *misspelt(rules)])
    note(storage(experiment))
    said = driver_of(profile)
    if on_slurm:
        note([*driver(said), *setup_script(rules), *requests(rules), *wall_limits(rules)])
    if try_job and not any(finding.kind == "FAIL" for finding in findings):
        trial = resources(largest | {"runtime": TRIAL_MINUTES}, 2 if on_slurm else 1)
        note(run_probe(experiment.root, trial, said))
    failed = sum(finding.kind == "FAIL" for finding in findings)
    if failed:
        raise UserError(f"{failed} of {len(findings)} checks failed")


def read_profile(profile: Path) -> dict[str, dict[str, Any]]:
    """Read the resources of each rule, with environment variables filled in."""
    file = profile / "config.yaml"
    try:
        rules = yte.process_yaml(file.read_text(encoding="utf-8"), require_use_yte=True)
        return {
            rule: {
                key: os.path.expandvars(value).strip("'") if isinstance(value, str) else value
                for key, value in values.items()
            }
            for rule, values in rules["set-resources"].items()
        }
    except (OSError, yaml.YAMLError, YteError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: not a cluster profile ({error})") from None


def driver_of(profile: Path) -> int | None:
    """Return the NVIDIA driver of a site, as its profile says."""
    said = yaml.safe_load((profile / "config.yaml").read_text(encoding="utf-8"))
    return (said.get("__variables__") or {}).get("driver")


def resources(asked: dict[str, Any], nodes: int) -> Resources:
    """Return a rule's resources on this many nodes; UserError if no machine has them."""
    given = {PROFILE[key][0]: value for key, value in asked.items() if key in PROFILE}
    return Resources.parse(**given | {"nodes": nodes})


def software() -> list[Finding]:
    """Check Python, the packages of the lock file, optional packages and the native decoder."""
    here = ".".join(map(str, sys.version_info[:3]))
    out = [Finding("ok", f"python {here} ({sys.executable})")]
    for package in PACKAGES:
        try:
            out.append(Finding("ok", f"{package} {version(package)}"))
        except PackageNotFoundError:
            hint = "`make install` on a node with internet"
            out.append(Finding("FAIL", f"{package} is not installed", hint))
    flash = importlib.util.find_spec("flash_attn") is not None
    what = "flash-attn is installed" if flash else "no flash-attn: SDPA is used"
    out.append(Finding("note", what))
    from maect.data.decode import decoder_name

    name = decoder_name()
    built = name.startswith("native")
    hint = "" if built else "optional; `python -P -m maect.data.native.build` says what is missing"
    return [*out, Finding("note", f"JPEG decoder: {name}", hint)]


def driver(said: int | None) -> list[Finding]:
    """Check that the installed PyTorch runs with the driver that the profile says."""
    import torch

    if torch.version.cuda is None:
        return [Finding("note", f"torch {torch.__version__} is built without CUDA")]
    needed = DRIVERS.get(int(torch.version.cuda.partition(".")[0]), 0)
    what = f"torch for CUDA {torch.version.cuda} needs NVIDIA driver {needed}"
    if said is None:
        hint = "`nvidia-smi` on a compute node shows it: write the number as `driver` there"
        return [Finding("note", f"{what}; the site's is unknown", hint)]
    hint = "install wheels of an older CUDA: docs/gpu.md, Drivers"
    return [result_of_check(said >= needed, f"{what}; the site has {said}", hint)]


def misspelt(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Return misspelt resources: no job reads them, and Snakemake says nothing."""
    known = [*PROFILE, *PROFILE_OF_TRAININGS]
    asked = sorted({(key, rule) for rule, keys in rules.items() for key in keys})
    out = []
    for key, rule in asked:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if near and key not in (*known, *SNAKEMAKES):
            what = f"{rule}: no job reads the resource {key}"
            out.append(Finding("FAIL", what, f"did you mean {near[0]}?"))
    return out


def setup_script(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Check that the scripts that jobs source exist and end well."""
    out = []
    asked = (values["setup"] for values in rules.values() if values.get("setup"))
    for script in dict.fromkeys(map(str, asked)):
        if not Path(script).exists():
            hint = "correct `setup` in the profile: a file below envs/, or a path in full"
            out.append(Finding("FAIL", f"setup script {script} does not exist", hint))
            continue
        words = ["bash", "-c", 'source "$0"', os.path.abspath(script)]
        done = subprocess.run(words, capture_output=True, text=True)
        stderr = " ".join(done.stderr.split())[:200]
        if done.returncode:
            hint = "every job would fail there: correct the script"
            out.append(Finding("FAIL", f"setup script {script} fails: {stderr}", hint))
        else:
            what = f"setup script {script}" + (f" prints: {stderr}" if stderr else "")
            out.append(Finding("note" if stderr else "ok", what))
    return out


def requests(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Check that SLURM would take a job of each kind (`sbatch --test-only`)."""
    if shutil.which("sbatch") is None:
        hint = "run this on a login node of the cluster"
        return [Finding("FAIL", "there is no sbatch on this machine", hint)]
    groups: dict[tuple[str, ...], tuple[Resources, list[str], bool]] = {}
    for rule, asked in rules.items():
        if asked.get("cluster") != "slurm":
            continue
        account = str(asked.get("slurm_account", ""))
        if account.startswith("$"):
            hint = f"export {account[1:]}=... in this shell, and where you start Snakemake"
            return [Finding("FAIL", f"account {account} is not set", hint)]
        least, most = node_range(str(asked.get("nodes", 1)))
        for nodes in sorted({least, most}):
            wanted = resources(asked, nodes)
            words = _sbatch(wanted)
            # The upper end of one rule's range may be the least that another rule asks for.
            _, rules_so_far, optional = groups.get(words, (wanted, [], True))
            groups[words] = (wanted, [*rules_so_far, rule], optional and nodes > least)
    return [_request(words, *group) for words, group in groups.items()]


def _request(
    words: tuple[str, ...], wanted: Resources, rules: list[str], is_the_most: bool
) -> Finding:
    code, _, stderr = command("sbatch", "--test-only", *words, "--wrap", "true")
    partition = wanted.partition or "the default partition"
    what = (
        f"{wanted.nodes} x {wanted.devices} devices in {partition}"
        f" for {wanted.minutes} min, account {wanted.account or 'default'} ({', '.join(rules)})"
    )
    if code == 0:
        return Finding("ok", what)
    said = stderr.splitlines()
    reason = said[-1] if said else f"sbatch ended with status {code}"
    reason = reason.removeprefix("allocation failure: ")
    if is_the_most:
        return Finding("note", f"too much: {what}: {reason}", "lower the upper end of `nodes`")
    hint = "correct partition, account, runtime, devices or slurm_extra of these rules"
    return Finding("FAIL", f"{what}: {reason}", hint)


def wall_limits(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Check that no job asks for more time than its partition gives, where SLURM says how much.

    `sbatch --test-only` takes longer ones, which then wait for ever, where a site does not enforce
    its limits. A QOS may have another limit.
    """
    asked: dict[str, tuple[int, str]] = {}
    for rule, values in rules.items():
        if values.get("cluster") == "slurm" and "slurm_partition" in values:
            partition = str(values["slurm_partition"])
            one = int(values.get("runtime", 0)), rule
            asked[partition] = max(asked.get(partition, one), one)
    out = []
    for partition, (minutes, rule) in asked.items():
        words = ("--noheader", f"--partition={partition}", "--format=%l")
        code, said, _ = command("sinfo", *words)
        limit = minutes_of(said.split()[0]) if code == 0 and said.strip() else None
        what = f"{partition}: jobs of up to {minutes} min ({rule})"
        if limit is None:
            out.append(Finding("note", f"{what}; SLURM says no wall limit"))
        else:
            hint = "lower `runtime` in the profile: longer trainings save and are queued again"
            out.append(
                result_of_check(minutes <= limit, f"{what}; the wall limit is {limit}", hint)
            )
    return out


def minutes_of(limit: str) -> int | None:
    """Parse a time of SLURM, such as 1-00:00:00 or 30:00, into minutes; None: no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (24 * days + hours) * 60 + minutes


def _sbatch(wanted: Resources) -> tuple[str, ...]:
    """Return the launcher's own parameters as options of sbatch."""
    parameters = submit.slurm(wanted, "maect-doctor", Path("doctor"))
    keys = ("partition", "account", "time", "nodes", "ntasks_per_node", "cpus_per_task", "mem")
    asked = {key: parameters[key] for key in keys} | parameters["additional_parameters"]
    return tuple(
        f"--{FLAGS.get(key, key)}" + ("" if value is True else f"={value}")
        for key, value in asked.items()
        if value is not None
    )


def storage(experiment: Experiment) -> list[Finding]:
    """Check that the experiment's results fit on the disk and may be written."""
    folder = experiment.root.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "set `storage` in the experiment to a folder of yours that all nodes share"
        return [Finding("FAIL", f"{folder}: cannot be written ({error.strerror})", hint)]
    size, files = needs(experiment)
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    inodes = system.f_favail
    hint = "free some space, or set `storage` in the experiment to a larger file system"
    room = size_text(free)
    wanted = size_text(size)
    space = f"{folder}: {room} free, about {wanted} needed for {experiment.name}"
    out = [result_of_check(free > size, space, hint)]
    if not system.f_files:
        return [*out, Finding("note", f"{folder}: unknown how many more files are possible")]
    what = f"{folder}: {inodes:,} more files possible, about {files:,} needed"
    return [*out, result_of_check(inodes > files, what, hint)]


def needs(experiment: Experiment) -> tuple[int, int]:
    """Estimate the bytes and files of the results that an experiment still lacks."""
    left = [run for run in experiment.runs.values() if not is_finished(experiment.folder(run.name))]
    size = 0
    files = FILES_PER_RUN * len(left)
    for name, dataset in experiment.datasets.items():
        for split, given in dataset.splits.items():
            known = shards_of(experiment.shards(name, split))
            if not known.written:
                size += known.bytes or 0
                files += 4 * given.shards
    for run in left:
        size += run.settings.state_bytes(run.encoder)
    for name, dataset_name, source in features_read(experiment):
        if not features_file(experiment, name, dataset_name, source).exists():
            images = shards_of(experiment.shards(dataset_name, source.split)).images or 0
            size += feature_bytes(experiment.runs[name].encoder, images, source.blocks)
    return size, files + 10 * len(experiment.evaluations)


def run_probe(root: Path, wanted: Resources, driver: int | None = None) -> list[Finding]:
    """Run the job in the experiment's own storage and judge the reports of its ranks."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f".doctor-{os.getpid()}-{int(time.time())}"
    result = folder / "probe.json"
    where = f"{counted(wanted.nodes, 'node')} x {wanted.devices}"
    try:
        launch(
            Task("maect.tools.probe:probe", {"folder": str(folder.absolute())}),
            folder, wanted, is_done=result.exists, describe=f"doctor on {where}",
        )  # fmt: skip
    except LaunchError as error:
        hint = f"logs: {folder}; the last lines say why, often the setup script or the network"
        return [Finding("FAIL", f"job on {where}: {error}", hint)]
    findings = judge(read_json(result), driver)
    shutil.rmtree(folder, ignore_errors=True)
    return findings


def judge(seen: dict[str, Any], driver: int | None = None) -> list[Finding]:
    """Judge the ranks' reports, where the profile says a driver."""
    ranks = seen["ranks"]
    count = len(seen["ranks"])
    versions = ", ".join(f"{name} {value}" for name, value in seen["versions"].items())
    where = counted(len({r["node"] for r in ranks}), "node")
    out = [Finding("ok", f"job on {where}, {count} ranks: {versions}")]
    # Where srun binds a device to each rank, a rank sees only its own.
    nodes = [{d for r in ranks if r["node"] == node for d in r["devices"]} for node in
             {r["node"] for r in ranks}]  # fmt: skip
    devices = min(map(len, nodes))
    names = ", ".join(sorted({r["device"] for r in ranks}))
    if devices:
        out.append(Finding("ok", f"{devices} GPUs a node: {names}"))
    else:
        out.append(Finding("note", "no GPU: ranks run on the CPU"))
    for found in sorted({r["driver"] for r in ranks if devices and r["driver"]}):
        what = f"NVIDIA driver {found}"
        hint = "correct `driver` in the profile"
        new_enough = driver is None or int(found.partition(".")[0]) >= driver
        out.append(result_of_check(new_enough, what, hint, f"{what}, not {driver}"))
    kind = "NCCL" if devices else "gloo"
    slowest = min(r["gigabytes"] for r in ranks)
    internet = "reach" if seen["internet"] else "have no"
    return [
        *out,
        result_of_check(
            all(r["sum"] == count * (count - 1) / 2 for r in ranks),
            f"{kind} all-reduce over {count} ranks: {slowest:.2f} GB/s",
            "name the interface in the setup script: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
            f"{kind} all-reduce gives a wrong sum",
        ),
        result_of_check(
            len({r["trained"] for r in ranks}) == 1,
            f"DeepSpeed trains a step over {count} ranks",
            "the same packages on every node? `make install` where all nodes see it",
            "weights differ between ranks after a step",
        ),
        result_of_check(
            all(r["files"] == count for r in ranks),
            "every rank sees the files of all others",
            "set `storage` in the experiment to a file system that all nodes share",
            "files written on one node are not seen on another",
        ),
        Finding("note", f"compute nodes {internet} internet"),
    ]
