"""`python -m maect.launch JOBS`: hand the job described in JOBS/request.json to submitit.

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

from maect.core.files import read_json, write_json
from maect.launch import worker


def main(jobs: Path) -> None:
    """Submit, and write the job's id or the error to JOBS/submitted.json."""
    value = read_json(jobs / "request.json")
    here = value["cluster"] == "local"
    # Nothing was started yet, or sbatch itself says no; after any other error a job may exist.
    refused = here or shutil.which("sbatch") is None
    try:
        executor = LocalExecutor(jobs) if here else SlurmExecutor(jobs, max_num_timeout=1000)
        executor.update_parameters(**value["parameters"])
        job = executor.submit(worker.run, value["request"])
    except Exception as error:
        # What sbatch says comes as a RuntimeError; only the others need their type.
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        refused = refused or isinstance(error, FailedJobError | TypeError | ValueError)
        write_json(jobs / "submitted.json", {"error": f"{kind}{error}", "refused": refused})
        raise
    found: dict[str, Any] = {"id": job.job_id, "host": socket.gethostname()}
    if here:
        found["created"] = psutil.Process(int(job.job_id)).create_time()
    write_json(jobs / "submitted.json", found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
