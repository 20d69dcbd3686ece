"""`python -m maect.launch FOLDER NAME`: hand the job of this name in FOLDER/job.json to submitit.

Only this process imports submitit: the launchers that wait for days stay small.
"""

import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
from submitit.core.utils import FailedJobError
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from maect.core.errors import UserError
from maect.core.files import write_json
from maect.launch import record, worker


def main(folder: Path, name: str) -> None:
    """Submit, and write the job's id or the error to `submitted.json`."""
    job = record.read_job(folder)
    if job is None or job.name != name or job.state == "ended":
        raise UserError(f"{folder / 'job.json'}: no longer asks for {name}")
    jobs = record.make_job_folder(folder, name)
    here = job.cluster == "local"
    # Nothing was started yet, or sbatch itself says no; after any other error a job may exist.
    refused = here or shutil.which("sbatch") is None
    try:
        executor = LocalExecutor(jobs) if here else SlurmExecutor(jobs, max_num_timeout=1000)
        executor.update_parameters(**job.request["parameters"])
        submitted = executor.submit(worker.run, str(folder), name)
    except Exception as error:
        # What sbatch says comes as a RuntimeError; only the others need their type.
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        refused = refused or isinstance(error, FailedJobError | TypeError | ValueError)
        write_json(jobs / "submitted.json", {"error": f"{kind}{error}", "refused": refused})
        raise
    answer: dict[str, Any] = {"id": submitted.job_id, "host": socket.gethostname()}
    if here:
        answer["created"] = psutil.Process(int(submitted.job_id)).create_time()
    write_json(jobs / "submitted.json", answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
