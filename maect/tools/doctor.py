"""`maect doctor`: whether a site is ready for an experiment, each fault with a hint.

Its job tests devices, the network between them, a training step and the shared file system.
"""

import ast
import difflib
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
import yte
from yte.exceptions import YteError

from maect.core.context import Context
from maect.core.distributed import destroy_group_after, driver, from_all
from maect.core.errors import UserError, counted
from maect.core.files import read_json, write_json
from maect.core.resources import Resources, node_range
from maect.experiment import Experiment
from maect.experiment.profile import CLUSTER, PLACE
from maect.launch import LaunchError, Task, launch
from maect.launch.shell import command
from maect.launch.slurm import script
from maect.stages import load_recipe
from maect.train.engine import Engine, start
from maect.train.stage import grouped

PACKAGES = ("torch", "deepspeed", "submitit", "snakemake", "safetensors", "timm")
SNAKEMAKES = ("mem_mib",)
"""Resources of Snakemake's own that are called nearly as one of ours."""
TRIAL_MINUTES = 15
SEEN = 60.0  # seconds for a file to become visible on another node
MEGABYTES = {"cuda": 256, "cpu": 8}
WIDTH = 64  # of the layer that is trained
ROUNDS = 5  # copies that are timed


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
    note([*software(), *misspelt(rules), *storage(experiment)])
    if on_slurm:
        note(requests(rules))
    if try_job and not any(finding.kind == "FAIL" for finding in findings):
        trial = resources(largest | {"runtime": TRIAL_MINUTES}, 2 if on_slurm else 1)
        note(run_probe(experiment.root, trial))
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
                key: unquoted(os.path.expandvars(value)) if isinstance(value, str) else value
                for key, value in values.items()
            }
            for rule, values in rules["set-resources"].items()
        }
    except (OSError, yaml.YAMLError, YteError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: not a cluster profile ({error})") from None


def unquoted(text: str) -> str:
    """Return the string that Snakemake reads where it takes a text for Python's; else the text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if isinstance(found, str) else text


def resources(asked: dict[str, Any], nodes: int) -> Resources:
    """Return a rule's resources on this many nodes; UserError if no machine has them."""
    given = {name: value for name, value in asked.items() if name in PLACE}
    return Resources(**given).resolved(nodes)


def software() -> list[Finding]:
    """Return the versions of Python and the main packages, and which decoder JPEGs have."""
    from maect.data.decode import decoder_name

    python = f"python {platform.python_version()} ({sys.executable})"
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    decoder = decoder_name()
    is_native = decoder.startswith("native")
    hint = "" if is_native else "`python -P -m maect.data.native.build` says what is missing"
    return [
        Finding("ok", ", ".join([python, *versions])),
        Finding("note", f"JPEG decoder: {decoder}", hint),
    ]


def misspelt(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Return misspelt resources: no job reads them, and Snakemake says nothing."""
    known = list(CLUSTER)
    asked = sorted({(key, rule) for rule, keys in rules.items() for key in keys})
    out = []
    for key, rule in asked:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if near and key not in (*known, *SNAKEMAKES):
            what = f"{rule}: no job reads the resource {key}"
            out.append(Finding("FAIL", what, f"did you mean {near[0]}?"))
    return out


def requests(rules: dict[str, dict[str, Any]]) -> list[Finding]:
    """Check that SLURM would take a job of each kind (`sbatch --test-only`)."""
    if shutil.which("sbatch") is None:
        hint = "run this on a login node of the cluster"
        return [Finding("FAIL", "there is no sbatch on this machine", hint)]
    groups: dict[Resources, tuple[list[str], bool]] = {}
    for rule, asked in rules.items():
        if asked.get("cluster") != "slurm":
            continue
        least, most = node_range(str(asked.get("nodes", 1)))
        for nodes in sorted({least, most}):
            try:
                wanted = resources(asked, nodes)
            except UserError as error:
                hint = "export the variables that the profile names; correct its other values"
                return [Finding("FAIL", f"{rule}: {error}", hint)]
            # The upper end of one rule's range may be the least that another rule asks for.
            rules_so_far, optional = groups.get(wanted, ([], True))
            groups[wanted] = ([*rules_so_far, rule], optional and nodes > least)
    return [_request(wanted, *group) for wanted, group in groups.items()]


def _request(wanted: Resources, rules: list[str], is_the_most: bool) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.sh"
        try:
            file.write_text(script(Path(folder), "maect-doctor", wanted), encoding="utf-8")
        except (RuntimeError, ValueError) as error:
            return Finding("FAIL", f"no script for sbatch: {error}")
        code, _, stderr = command("sbatch", "--test-only", str(file))
    partition = wanted.slurm_partition or "the default partition"
    account = wanted.slurm_account or "default"
    what = (
        f"{wanted.nodes} x {wanted.devices} devices in {partition}"
        f" for {wanted.runtime} min, account {account} ({', '.join(rules)})"
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


def storage(experiment: Experiment) -> list[Finding]:
    """Check that the experiment's results may be written."""
    folder = experiment.root.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "set `storage` in the experiment to a folder of yours that all nodes share"
        return [Finding("FAIL", f"{folder}: cannot be written ({error.strerror})", hint)]
    return [Finding("ok", f"{folder}: can be written")]


def run_probe(root: Path, wanted: Resources) -> list[Finding]:
    """Run the job in the experiment's own storage and judge the reports of its ranks."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f".doctor-{os.getpid()}-{int(time.time())}"
    result = folder / "probe.json"
    where = f"{counted(int(wanted.nodes), 'node')} x {wanted.devices}"
    try:
        launch(
            Task("maect.tools.doctor:probe", {"folder": str(folder.absolute())}),
            folder, wanted, is_done=result.exists, describe=f"doctor on {where}",
        )  # fmt: skip
    except LaunchError as error:
        hint = f"logs: {folder}; the last lines say why, often the setup script or the network"
        return [Finding("FAIL", f"job on {where}: {error}", hint)]
    findings = judge(read_json(result))
    shutil.rmtree(folder, ignore_errors=True)
    return findings


def judge(seen: dict[str, Any]) -> list[Finding]:
    """Judge the ranks' reports."""
    ranks = seen["ranks"]
    count = len(ranks)
    over = counted(count, "rank")
    versions = ", ".join(f"{name} {value}" for name, value in seen["versions"].items())
    where = counted(len({r["node"] for r in ranks}), "node")
    out = [Finding("ok", f"job on {where}, {over}: {versions}")]
    # Where srun binds a device to each rank, a rank sees only its own.
    nodes = [{d for r in ranks if r["node"] == node for d in r["devices"]} for node in
             {r["node"] for r in ranks}]  # fmt: skip
    devices = min(map(len, nodes))
    names = ", ".join(sorted({r["device"] for r in ranks}))
    if devices:
        out.append(Finding("ok", f"{devices} GPUs a node: {names}"))
    else:
        out.append(Finding("note", "no GPU: ranks run on the CPU"))
    drivers = sorted({r["driver"] for r in ranks if r["driver"]})
    if devices and drivers:
        out.append(Finding("ok", f"NVIDIA driver {', '.join(drivers)}"))
    kind = "NCCL" if devices else "gloo"
    slowest = min(r["gigabytes"] for r in ranks)
    return [
        *out,
        result_of_check(
            all(r["sum"] == count * (count - 1) / 2 for r in ranks),
            f"{kind} all-reduce over {over}: {slowest:.2f} GB/s",
            "name the interface in the setup script: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
            f"{kind} all-reduce gives a wrong sum",
        ),
        result_of_check(
            len({r["trained"] for r in ranks}) == 1,
            f"DeepSpeed trains a step over {over}",
            "the same packages on every node? `make install` where all nodes see it",
            "weights differ between ranks after a step",
        ),
        result_of_check(
            all(r["files"] == count for r in ranks),
            "every rank sees the files of all others",
            "set `storage` in the experiment to a file system that all nodes share",
            "files written on one node are not seen on another",
        ),
    ]


def probe(context: Context, folder: str) -> str:
    """Probe this rank; rank 0 writes the reports of all to `probe.json`."""
    device = start(context)
    cuda = device.type == "cuda"
    with destroy_group_after():
        own = torch.full((1,), float(context.rank), device=device)
        dist.all_reduce(own)
        seen = {
            "host": socket.gethostname(),
            "node": context.node,
            "devices": _device_ids(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "driver": driver(),
            "sum": own.item(),
            "files": _files_seen(context, Path(folder)),
            "gigabytes": _bandwidth(device),
            "trained": _trained(context, device),
        }
        everyone = from_all(seen)
    if context.rank == 0:
        write_json(Path(folder) / "probe.json", {"ranks": everyone, "versions": _versions()})
    return "done"


def _trained(context: Context, device: Any) -> float:
    """Sum of a layer's weights after a step of the engine that trainings use, under ZeRO 1.

    The same on all ranks if the step has worked.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, WIDTH).to(device)
    settings = load_recipe("mae", "base", {"batch_size": context.world_size})
    groups = grouped(layer, lambda name: (0.1, 0.0))
    engine = Engine(layer, settings, groups, device)
    x = torch.full((1, WIDTH), 1.0 + context.rank, device=device)
    engine.backward(engine(x).square().mean())
    engine.step(1.0)
    engine.close()
    return float(layer.weight.detach().double().sum())


def _device_ids() -> list[str]:
    """Return a unique name of each device that this rank sees."""
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [str(getattr(device, "uuid", number)) for number, device in enumerate(devices)]


def _files_seen(context: Context, folder: Path) -> int:
    """Return how many ranks' files this rank comes to see."""
    write_json(folder / f"seen-{context.rank}.json", context.rank)
    deadline = time.monotonic() + SEEN
    while True:
        count = len(list(folder.glob("seen-*.json")))
        if count == context.world_size or time.monotonic() > deadline:
            return count
        time.sleep(0.2)


def _bandwidth(device: Any) -> float:
    """Measure the GB/s of a large all-reduce: bytes of the tensor over its time."""
    tensor = torch.ones(MEGABYTES[device.type] * 250_000, device=device)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 4e-9 * tensor.numel() * ROUNDS / (time.perf_counter() - start)


def _versions() -> dict[str, str]:
    """Return the versions that a rank computes with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions
