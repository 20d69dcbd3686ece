"""Submission of a job: its request, its environment, the parameters of submitit."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

import maect
from maect.core import processes
from maect.core.processes import SAFE_PATH
from maect.launch import record
from maect.launch.owner import SNAKEMAKE
from maect.launch.record import Job, Request
from maect.launch.resources import LaunchError, Resources, Task, gpus_here

PATIENCE = 300.0  # seconds for sbatch, which itself gives up on a controller after about 100
MARK = "MAECT_JOB"  # in the environment of every process of a job: the job's unique name
FOREIGN = ("SUBMITIT_", "PMI_", "PMIX_", "OMPI_", MARK, SNAKEMAKE)
SLURM_SETTINGS = (
    "SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_",
    "SCONTROL_",
)  # fmt: skip
SLURM_ADDRESSES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def request(job: Job, folder: Path, task: Task, resources: Resources) -> Request:
    """Return what the ranks and the process that submits them (`__main__.py`) need to know."""
    if resources.cluster == "local":
        parameters = local(resources)
        gpus = gpus_here() > 0
    else:
        parameters = slurm(resources, job.name, folder)
        gpus = _asks_for_gpus(parameters)
    return {
        "function": task.function,
        "arguments": task.arguments,
        "identity": task.identity,
        "cpus": resources.cpus,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": gpus,
        "parameters": parameters,
        "python": resources.python,
    }


def _asks_for_gpus(parameters: dict[str, Any]) -> bool:
    extra = parameters["additional_parameters"]
    gres = str(extra.get("gres", "")).split(",")
    named = any(key.startswith("gpus") for key in extra)
    return named or any(kind.startswith("gpu") for kind in gres)


class Submission(TypedDict, total=False):
    """Outcome of a submission: the job's id, or an error.

    An error with `refused` true means that there is no job; after any other there may be one, which
    its unique name will show.
    """

    id: str
    error: str
    refused: bool


def submit(folder: Path, job: Job, watch: Callable[[], None]) -> Submission:
    """Submit the job on record in a process of its own, calling `watch` meanwhile.

    That process has its own session (a Ctrl-C in the terminal does not reach the ranks) and goes
    through with the submission even if the launcher ends meanwhile.
    """
    # Files without a name, not pipes: the process may outlive this one, and a local job has them.
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "maect.launch", str(folder), job.name],
            env=environment(job.name, job.request["cpus"]),
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=messages,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return {"error": f"the submission did not answer in {PATIENCE:.0f} s"}
            watch()
            time.sleep(0.02)
        answer.seek(0)
        messages.seek(0)
        for line in reversed(answer.read().decode(errors="replace").splitlines()):
            if line.startswith("{"):
                return cast(Submission, json.loads(line))
        last = messages.read().decode(errors="replace").strip().splitlines()[-record.LOG_TAIL :]
        return {"error": "\n".join(["the submission broke off:", *last])}


def environment(name: str, cpus: int) -> dict[str, str]:
    """Return the environment of a job: ours, without traces of a job that we may be inside of."""
    kept = {
        key: value
        for key, value in processes.environment().items()
        if key not in RENDEZVOUS and not key.startswith(FOREIGN) and not is_slurm_setting(key)
    }
    # cloudpickle stores an importable module by its name: the ranks must find it too.
    home = str(Path(maect.__file__).parent.parent)
    others = [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path != home]
    kept["PYTHONPATH"] = os.pathsep.join([home, *filter(None, others)])
    # Threads of several jobs share the cores here: one that waits must not keep another from work.
    kept.setdefault("OMP_WAIT_POLICY", "passive")
    return kept | {MARK: name, "OMP_NUM_THREADS": str(cpus), "SRUN_CPUS_PER_TASK": str(cpus)}


def is_slurm_setting(key: str) -> bool:
    """Return whether a variable changes SLURM's commands, other than where they find SLURM."""
    return key.startswith(SLURM_SETTINGS) and key not in SLURM_ADDRESSES


def check_shell() -> None:
    """Refuse a shell that names other clusters (LaunchError)."""
    for key in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        if os.environ.get(key):
            raise LaunchError(
                f"{key}={os.environ[key]} is set: jobs are submitted to the cluster of this login "
                f"node only; unset {key} here, or start on a login node of the other cluster"
            )


def local(resources: Resources) -> dict[str, Any]:
    """Return the parameters of submitit's local executor."""
    return {
        "tasks_per_node": resources.devices,
        "timeout_min": resources.minutes,
        "signal_delay_s": resources.warning_seconds,
        "stderr_to_stdout": True,
    }


def slurm(resources: Resources, name: str, folder: Path) -> dict[str, Any]:
    """Return the parameters of submitit's SLURM executor."""
    extra: dict[str, Any] = {"requeue": True}
    for argument in resources.sbatch:
        key, _, value = argument.partition("=")
        extra[key.strip().lstrip("-")] = value.strip() or True
    if not any(key.startswith("gpus") or key == "gres" for key in extra):
        extra["gres"] = f"gpu:{resources.devices}"
    ours = environment(name, resources.cpus)
    names = (MARK, "PYTHONPATH", SAFE_PATH, "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK")
    # Exported once more: a site may start jobs without the submitter's environment.
    setup = ['echo "maect: attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"']
    setup += [f"export {key}={shlex.quote(ours[key])}" for key in names]
    if resources.setup:
        setup.append(f"source {shlex.quote(resources.setup)} || exit 1")
    return {
        "job_name": name,
        "comment": str(folder),
        "partition": resources.partition,
        "account": resources.account,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.devices,
        "cpus_per_task": resources.cpus,
        "mem": f"{resources.memory_mb}MB" if resources.memory_mb else None,
        "signal_delay_s": resources.warning_seconds,
        "setup": setup,
        "srun_args": ["--kill-on-bad-exit=1"],
        "additional_parameters": extra,
        "stderr_to_stdout": True,
        "wckey": None,
    }
