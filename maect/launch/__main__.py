"""Hand a job to submitit: `python -P -m maect.launch FOLDER NAME`.

Only this process imports submitit: the launchers that wait for days stay small.
"""

import json
import re
import shlex
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from maect.core.errors import UserError
from maect.launch import record, submit, worker
from maect.launch.slurm import command

ID = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?$", re.MULTILINE)


class Sbatch(SlurmExecutor):
    """submitit's executor, with sbatch's `--parsable` answer: a banner is not taken for an id.

    submitit 1.5.4 has no public method for it.
    """

    def _submit_command(self, command_line: str) -> "SlurmJob[Any]":
        script = Path(self.folder) / f".submission_{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command_line, ""), encoding="utf-8")
        words = ("sbatch", "--parsable", str(script))
        code, out, error = command(*words, timeout=submit.PATIENCE)
        if code:
            # Only sbatch's own exit status shows that there is no job.
            failure = RuntimeError if code in (124, 127) else FailedJobError
            raise failure(error or f"sbatch: exit status {code}")
        ids = ID.findall(out)
        if not ids:
            raise RuntimeError(f"no job id in what sbatch answered: {out[:200]!r}")
        job: SlurmJob[Any] = self.job_class(
            folder=self.folder, job_id=ids[-1], tasks=list(range(self._num_tasks()))
        )
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job


def main(folder: Path, name: str) -> None:
    """Submit the job on record; print its id, or the error, as a line of JSON."""
    job = record.read_job(folder)
    if job is None or job.name != name or job.state == "ended":
        raise UserError(f"{folder / 'job.json'}: no longer asks for {name}")
    jobs = record.make_job_folder(folder, name)
    is_local = job.cluster == "local"
    # Imports nothing from the folder that the job begins in, where others may write.
    python = f"{job.request.get('python') or shlex.quote(sys.executable)} -P"
    try:
        executor: LocalExecutor | Sbatch
        if is_local:
            executor = LocalExecutor(jobs, python=python)
        else:
            executor = Sbatch(jobs, max_num_timeout=1000, python=python)
        executor.update_parameters(**job.request["parameters"])
        submitted = executor.submit(worker.run, str(folder), name)
    except Exception as error:
        # sbatch's own message comes as a RuntimeError; only the others need their type.
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        # Nothing was started, or sbatch itself says no; after any other error a job may exist.
        refused = is_local or shutil.which("sbatch") is None
        refused = refused or isinstance(error, FailedJobError | TypeError | ValueError)
        print(json.dumps({"error": f"{kind}{error}", "refused": refused}))
        raise
    print(json.dumps({"id": submitted.job_id}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
