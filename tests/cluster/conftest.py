"""The test cluster, started once for all tests that need it."""

import getpass
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit" / "launch"))

from launching import Run  # noqa: E402
from slurm_cluster import ACCOUNT, Cluster, missing  # noqa: E402


class SlurmRun(Run):
    """A run folder whose jobs go to the test cluster."""

    def __init__(self, folder: Path, cluster: Cluster, **resources: object) -> None:
        usual = {"cluster": "slurm", "nodes": 2, "devices": 2, "minutes": 30}
        super().__init__(
            folder, **{**usual, "partition": "booster", "account": ACCOUNT, **resources}
        )
        self.slurm = cluster

    def jobs(self) -> dict[str, str]:
        """Id and state of every job that SLURM has ever had under this run's name."""
        out = self.slurm.run("squeue", "-h", "-t", "all", "-o", "%i %T %j")
        rows = (line.split() for line in out.splitlines())
        return {row[0]: row[1] for row in rows if row[2].startswith(f"maect-{self.folder.name}-")}

    def live(self) -> list[str]:
        """Jobs that are not over."""
        live = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
        return [key for key, state in self.jobs().items() if state in live]

    def noted(self) -> set[str]:
        """Job ids that `job.json` accounts for."""
        job = self.read("job.json")
        return {str(entry["id"]) for entry in [*job["earlier"], job] if entry["id"]}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        give_up = pytest.fail if os.environ.get("CI") and os.geteuid() == 0 else pytest.skip
        give_up(f"SLURM test cluster: {reason}")
    # Unix socket paths are short: pytest's own folders are too deep.
    place = Path(os.environ.get("TMPDIR", "/tmp"))
    for left in place.glob("maect-test-cluster-*"):
        if not psutil.pid_exists(int(left.name.rsplit("-", 1)[1])):
            Cluster(left).stop()  # its session was killed
            shutil.rmtree(left, ignore_errors=True)
    root = place / f"maect-test-cluster-{os.getpid()}"
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmRun]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MAECT_SQUEUE_SECONDS", "1")
    run = SlurmRun(tmp_path / f"run{time.monotonic_ns()}", cluster)
    yield run
    for process in run.launchers:
        if process.poll() is None:
            run.kill(process)
    cluster.run("scancel", "-u", getpass.getuser())
    run.end()
    for node, state in cluster.node_states().items():
        if state.startswith("down"):
            cluster.start_node(node)
    deadline = time.monotonic() + 40
    while set(cluster.node_states().values()) != {"idle"}:
        assert time.monotonic() < deadline, cluster.node_states()
        time.sleep(0.2)
