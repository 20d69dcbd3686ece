"""A run folder on the test cluster, and what must hold at its end."""

import subprocess
from pathlib import Path

from counting import expected
from launching import Run, finish, wait_for
from slurm_cluster import ACCOUNT, Cluster

USUAL = {
    "cluster": "slurm", "cpus_per_task": 1, "runtime": 30, "slurm_partition": "booster",
    "slurm_account": ACCOUNT,
}  # fmt: skip
LIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")


class SlurmRun(Run):
    """A run folder whose jobs go to the test cluster; with one rank, unless told otherwise."""

    def __init__(self, folder: Path, cluster: Cluster, **resources: object) -> None:
        super().__init__(folder, **{**USUAL, **resources})
        self.slurm = cluster

    def beside(self, name: str, **resources: object) -> "SlurmRun":
        """Another run in the same place."""
        folder = self.folder.with_name(f"{self.folder.name}-{name}")
        return SlurmRun(folder, self.slurm, **resources)

    def jobs(self) -> dict[str, str]:
        """Id and state of every job that SLURM has ever had under this run's name."""
        out = self.slurm.run("squeue", "-h", "-t", "all", "-o", "%i %T %j")
        rows = (line.split(maxsplit=2) for line in out.splitlines())
        return {row[0]: row[1] for row in rows if row[2].startswith(f"maect-{self.folder.name}-")}

    def live(self) -> list[str]:
        """Jobs that are not over."""
        return [key for key, state in self.jobs().items() if state in LIVE]

    def release(self) -> None:
        """Spare the jobs that SLURM has put back into the queue their two minutes of waiting."""
        for job, state in self.jobs().items():
            if state == "PENDING":
                self.slurm.release(job)

    def wait(self, launcher: "subprocess.Popen[str]", seconds: float = 400) -> str:
        """The words of a launcher whose jobs SLURM puts back into the queue meanwhile."""

        def is_over() -> bool:
            self.release()
            return launcher.poll() is not None

        wait_for(is_over, seconds, what="for the launcher", pause=1.0)
        return finish(launcher)

    def undisturbed(self, steps: int) -> None:
        """The result of a run that was never disturbed; each job accounted for, nothing left."""
        assert self.read("done.json") == expected(steps)
        self.settled()
        starts = [(start["name"], start["attempt"]) for start in self.starts()]
        assert len(set(starts)) == len(starts), "a job ran twice"

    def settled(self) -> None:
        """Nothing is left behind, and each job is accounted for."""
        wait_for(lambda: not self.live() and not self.processes(), what="for all to be gone")
        job = self.job()
        assert {job.id, *job.earlier} - {None} == set(self.jobs()), "job.json does not know one"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"SLURM_CONF": str(self.slurm.conf)}
