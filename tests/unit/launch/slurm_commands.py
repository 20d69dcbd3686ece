"""Stand-ins for SLURM's commands, and a clock."""

import time
from pathlib import Path

UNKNOWN = "slurm_load_jobs error: Invalid job id specified"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller"
SCRIPT = """#!/bin/sh
echo "$0 $*" >> {folder}/asked
[ "$2" = config ] && echo "ClusterName = here" && exit 0
error=$(cat {folder}/{name}.fails 2> /dev/null) && {{ printf %s "$error" >&2; exit 1; }}
cat {folder}/{name}.says 2> /dev/null
exit 0
"""
SHOWN = "JobId={id} JobName={name} UserId=me(1) JobState={state} Reason={reason} Comment={comment}"


class Commands:
    """Stand-ins for SLURM's commands that say what a file holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sacct", "scancel", "scontrol", "sbatch", "srun"):
            script = self.folder / name
            script.write_text(SCRIPT.format(folder=self.folder, name=name))
            script.chmod(0o755)
        self.fails("scontrol", UNKNOWN)

    def says(self, name: str, text: str) -> None:
        self._write(f"{name}.says", text)
        (self.folder / f"{name}.fails").unlink(missing_ok=True)

    def fails(self, name: str, error: str) -> None:
        self._write(f"{name}.fails", error)

    def shows(
        self, state: str, name: str, reason: str = "None", id: str = "7", comment: str = "/x"
    ) -> None:
        """Let the controller know a job."""
        self.says("scontrol", SHOWN.format(**locals()))

    def _write(self, name: str, text: str) -> None:
        """Write a file that the commands never see half written."""
        (self.folder / "new").write_text(text)
        (self.folder / "new").replace(self.folder / name)

    def asked(self, name: str) -> list[str]:
        file = self.folder / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.split()[0].endswith(f"/{name}")]


class Clock:
    """Stands in for the module `time`: a loaded machine does not move it."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
