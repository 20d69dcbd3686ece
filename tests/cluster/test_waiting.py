"""Jobs that wait in SLURM's queue, or for a place in it."""

import signal

import pytest
from launching import finish, wait_for
from slurm_cluster import ACCOUNT

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


def test_a_folder_with_blanks_in_its_name(run):
    """The controller's word about a job is `KEY=VALUE KEY=VALUE ...`."""
    other = run.beside("a b", sbatch=["begin=now+1hour"])
    launcher = other.start()
    wait_for(lambda: other.read("job.json").get("id"))
    assert clusters()["slurm"].waits(other.folder, other.job())
    launcher.send_signal(signal.SIGINT)
    assert "cancelled at step 0" in finish(launcher)


@pytest.mark.parametrize("limit", ["MaxSubmitJobs", "GrpSubmitJobs"])
def test_a_limit_on_submitted_jobs_is_waited_for(run, limit):
    change = ("sacctmgr", "-i", "modify", "account", ACCOUNT, "set")
    run.slurm.run(*change, f"{limit}=0")
    try:
        launcher = run.start(steps=50)
        wait_for(lambda: str(run.read("job.json").get("ending")).startswith("not accepted"))
        ending = run.job().ending
        assert status_of(run.folder, "count", False, clusters()).state == "waiting"
    finally:
        run.slurm.run(*change, f"{limit}=-1")
    words = finish(launcher)
    assert "SLURM takes no more jobs for now" in words and "SubmitJob" in ending, words
    assert len(run.jobs()) == 1 and not run.job().earlier
    run.undisturbed(50)
