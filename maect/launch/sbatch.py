"""Submission of a job to SLURM through submitit, which only a launcher that submits imports."""

import re
import shlex
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from maect.core.owners import SAFE_PATH
from maect.launch import record, worker
from maect.launch.record import Job
from maect.launch.resources import LaunchError, Resources
from maect.launch.shell import MARK, command, environment

ID = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?$", re.MULTILINE)
PATIENCE = 300.0  # seconds for sbatch, which itself gives up on a controller after about 100


class Sbatch(SlurmExecutor):
    """submitit's executor, with sbatch's `--parsable` answer: a banner is not taken for an id.

    submitit 1.5.4 has no public method for it.
    """

    environment: dict[str, str]

    def _submit_command(self, command_line: str) -> "SlurmJob[Any]":
        script = Path(self.folder) / f".submission_{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command_line, ""), encoding="utf-8")
        words = ("sbatch", "--parsable", str(script))
        code, out, error = command(*words, timeout=PATIENCE, env=self.environment)
        if code:
            raise LaunchError(error or f"sbatch: exit status {code}")
        ids = ID.findall(out)
        if not ids:
            raise LaunchError(f"no job id in what sbatch answered: {out[:200]!r}")
        job: SlurmJob[Any] = self.job_class(
            folder=self.folder, job_id=ids[-1], tasks=list(range(self._num_tasks()))
        )
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job


def submit(folder: Path, job: Job, resources: Resources) -> str:
    """Submit the job on record; return its id.

    Raises:
        LaunchError: sbatch's own message.
        RuntimeError, ValueError: submitit's, such as of a machine without SLURM.
    """
    # Imports nothing from the folder that the job begins in, where others may write.
    python = f"{resources.python or shlex.quote(sys.executable)} -P"
    executor = Sbatch(record.make_job_folder(folder, job.name), python=python)
    executor.environment = environment(job.name, job.cpus)
    executor.update_parameters(**parameters(resources, job.name, folder))
    return str(executor.submit(worker.run, str(folder), job.name).job_id)


def end_submission(folder: Path, job: Job) -> None:
    """Move what a job calls to where it looks for it: its launcher died before it knew the id."""
    jobs = record.job_folder(folder, job.name)
    submitted = JobPaths(jobs, job_id=str(job.id)).submitted_pickle
    for file in jobs.glob("*.pkl"):
        if not submitted.exists():
            with suppress(FileNotFoundError):  # renamed just now, by a launcher that is ending
                file.rename(submitted)


def parameters(resources: Resources, name: str, folder: Path) -> dict[str, Any]:
    """Return the parameters of submitit's SLURM executor."""
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
        "additional_parameters": resources.options,
        "stderr_to_stdout": True,
        "wckey": None,
    }
