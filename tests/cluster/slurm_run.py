"""A run folder on the test cluster, what must hold at its end, and a line of the fault table."""

import contextlib
import csv
import errno
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from counting import expected
from launching import Run, finish, wait_for
from slurm_cluster import ACCOUNT, Cluster

LIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")


@dataclass
class Table:
    """What was seen of each fault, for `--fault-table`."""

    rows: dict[str, list[str]] = field(default_factory=dict)

    def note(self, fault: str, seen: str, jobs: int, repeated: float) -> None:
        self.rows[fault] = [fault, seen, str(jobs), f"{repeated:.1f}"]

    def write(self, file: Path) -> None:
        """Write the table; lines of faults that were not tried this time stay."""
        old = list(csv.reader(file.read_text().splitlines())) if file.exists() else []
        rows = {row[0]: row for row in old[1:]} | self.rows
        head = ["fault", "what was seen", "jobs", "work repeated, s"]
        with file.open("w", encoding="utf-8", newline="") as table:
            csv.writer(table, lineterminator="\n").writerows([head, *rows.values()])


class SlurmRun(Run):
    """A run folder whose jobs go to the test cluster."""

    def __init__(self, folder: Path, cluster: Cluster, table: Table, **resources: object) -> None:
        usual = {"cluster": "slurm", "nodes": 2, "devices": 2, "minutes": 30}
        super().__init__(
            folder, **{**usual, "partition": "booster", "account": ACCOUNT, **resources}
        )
        self.slurm, self.table = cluster, table

    def beside(self, name: str, **resources: object) -> "SlurmRun":
        """Another run in the same place."""
        folder = self.folder.with_name(f"{self.folder.name}-{name}")
        return SlurmRun(folder, self.slurm, self.table, **resources)

    def jobs(self) -> dict[str, str]:
        """Id and state of every job that SLURM has ever had under this run's name."""
        out = self.slurm.run("squeue", "-h", "-t", "all", "-o", "%i %T %j")
        rows = (line.split() for line in out.splitlines())
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

    @contextlib.contextmanager
    def small_disk(self, size: str) -> Iterator[None]:
        """The run folder has a file system of its own."""
        self.folder.mkdir()
        self.slurm.run(
            "mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "none", str(self.folder)
        )
        try:
            yield
        finally:
            self.end()
            self.slurm.run("umount", "--lazy", str(self.folder))

    def fill_disk(self) -> Path:
        """Leave no byte free; returns the file to delete."""
        with open(self.folder / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        return self.folder / "filler"

    def noted(self) -> set[str]:
        """Job ids that `job.json` accounts for."""
        job = self.read("job.json")
        return {*job["earlier"], *([job["id"]] if job["id"] else [])}

    def repeated(self) -> float:
        """Seconds that rank 0 spent on steps which an earlier attempt had done."""
        seen, again, seconds = 0, 0, [0.0]
        for start in self.starts():
            file = self.folder / "meetings" / f"{start['name']}-{start['attempt']}" / "0"
            rows = [row.split() for row in file.read_text().splitlines()]
            again += sum(int(row[0]) <= seen for row in rows)
            seconds += [float(b[2]) - float(a[2]) for a, b in itertools.pairwise(rows)]
            seen = max([seen, *(int(row[0]) for row in rows)])
        return again * mean(seconds)

    def undisturbed(self, steps: int, fault: str = "", seen: str = "") -> None:
        """The result of a run that was never disturbed; each job accounted for, nothing left."""
        assert self.read("done.json") == expected(steps)
        self.settled()
        starts = [(start["name"], start["attempt"]) for start in self.starts()]
        assert len(set(starts)) == len(starts), "a job ran twice"
        if fault:
            self.table.note(fault, seen, len(self.jobs()), self.repeated())

    def settled(self) -> None:
        """Nothing is left behind, and each job is accounted for."""
        wait_for(lambda: not self.live() and not self.processes(), what="for all to be gone")
        assert self.noted() == set(self.jobs()), "a job that job.json does not know"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"SLURM_CONF": str(self.slurm.conf)}
