"""`maect status` of a job that waits in SLURM's queue."""

import pytest
from launching import wait_for

from maect.launch import clusters
from maect.tools.status import columns, status_of

pytestmark = pytest.mark.cluster


def test_waiting_with_slurms_reason(run):
    run.resources["sbatch"] = ["begin=now+1hour"]
    seen = clusters()
    run.start()
    wait_for(lambda: list(run.jobs().values()) == ["PENDING"])
    wait_for(lambda: run.read("job.json").get("id"))
    wait_for(lambda: status_of(run.folder, "count", False, seen).state == "waiting")
    table = "\n".join(columns([status_of(run.folder, "count", False, seen)]))
    assert f"slurm {run.read('job.json')['id']}" in table and "PENDING (BeginTime)" in table
