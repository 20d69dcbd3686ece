"""Environment of a job's processes, and how SLURM's commands are run."""

import os
import subprocess
from pathlib import Path

import maect
from maect.core import owners
from maect.launch.owner import SNAKEMAKE

TIMEOUT = 60.0  # seconds for a command's answer
MARK = "MAECT_JOB"  # in the environment of every process of a job: the job's unique name
FOREIGN = ("SUBMITIT_", "PMI_", "PMIX_", "OMPI_", MARK, SNAKEMAKE)
SLURM_SETTINGS = (
    "SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_",
    "SCONTROL_",
)  # fmt: skip
SLURM_ADDRESSES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(name: str, cpus: int) -> dict[str, str]:
    """Return the environment of a job: ours, without traces of a job that we may be inside of."""
    kept = {
        key: value
        for key, value in owners.environment().items()
        if key not in RENDEZVOUS and not key.startswith(FOREIGN) and not is_slurm_setting(key)
    }
    # The ranks import maect by its name, from wherever it is installed.
    home = str(Path(maect.__file__).parent.parent)
    others = [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path != home]
    kept["PYTHONPATH"] = os.pathsep.join([home, *filter(None, others)])
    # Threads of several jobs share the cores here: one that waits must not keep another from work.
    kept.setdefault("OMP_WAIT_POLICY", "passive")
    return kept | {MARK: name, "OMP_NUM_THREADS": str(cpus), "SRUN_CPUS_PER_TASK": str(cpus)}


def is_slurm_setting(key: str) -> bool:
    """Return whether a variable changes SLURM's commands, other than where they find SLURM."""
    return key.startswith(SLURM_SETTINGS) and key not in SLURM_ADDRESSES


def command(
    *words: str, timeout: float = TIMEOUT, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a SLURM command, out of reach of a Ctrl-C: (exit status, stdout, stderr).

    It sees nothing of the settings that a user's shell may have for it.
    """
    variables = dict(os.environ) if env is None else env
    try:
        result = subprocess.run(
            words,
            env={key: value for key, value in variables.items() if not is_slurm_setting(key)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # job names may be anything
            timeout=timeout,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{words[0]} did not answer in {timeout:.0f} s"
    except OSError as error:
        return 127, "", f"{words[0]}: {error.strerror}"
    return result.returncode, result.stdout.strip(), result.stderr.strip()
