"""The test cluster, started once for all tests that need it."""

import contextlib
import fcntl
import getpass
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "unit" / "launch"), str(HERE.parent / "end_to_end")]

from slurm_cluster import Cluster, missing  # noqa: E402
from slurm_run import SlurmRun  # noqa: E402


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        give_up = pytest.fail if os.environ.get("MAECT_CI") else pytest.skip
        give_up(f"SLURM test cluster: {reason}")
    # Unix socket paths are short: pytest's own folders are too deep.
    place = Path(os.environ.get("TMPDIR", "/tmp"))
    with contextlib.ExitStack() as stack:
        for number in range(10):  # several checkouts may be tested at once
            root = place / f"maect-test-cluster-{number}"
            lock = stack.enter_context(root.with_suffix(".lock").open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            pytest.fail(f"ten test clusters run already ({place}/maect-test-cluster-*)")
        cluster = Cluster(root, port=26800 + 100 * number)
        if root.exists():
            cluster.stop()  # its session was killed
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
            shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmRun]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
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
    deadline = time.monotonic() + 90
    while set(cluster.node_states().values()) != {"idle"}:
        assert time.monotonic() < deadline, cluster.node_states()
        time.sleep(0.2)
