"""Jobs that wait in SLURM's queue, or for a place in it."""

import signal
import time

import pytest
from counting import expected
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
    assert clusters()["slurm"].poll(other.folder, other.job()).phase == "pending"
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
    assert "SLURM takes no job for now" in words and "SubmitJob" in ending, words
    assert len(run.jobs()) == 1 and not run.job().earlier
    run.undisturbed(50)


@pytest.mark.parametrize("how", ["hold", "requeuehold"])
def test_a_held_job_is_named_with_its_cure(run, how):
    if how == "hold":
        run.resources["sbatch"] = ["begin=now+1hour"]
    launcher = run.start(steps=400)
    wait_for(lambda: run.state() == "submitted")
    if how == "requeuehold":
        run.reaches(10)
    job = run.job().id
    run.slurm.run("scontrol", how, job)
    seen = []
    wait_for(lambda: seen.append(launcher.stderr.readline()) or "scontrol release" in seen[-1])
    assert f"`scontrol release {job}`" in seen[-1], seen
    time.sleep(3)  # credentials of the second of a requeue are revoked with it
    run.slurm.run("scontrol", "release", job)
    run.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    words = run.wait(launcher)
    assert "scontrol release" not in words and len(run.jobs()) == 1, words
    run.undisturbed(400)


def test_a_renamed_job_is_the_run_s(run):
    """A user who tidies his queue, while the job runs: nothing is submitted beside it."""
    launcher = run.start(steps=400)
    run.reaches(10)
    job = run.job().id
    run.slurm.run("scontrol", "update", f"JobId={job}", "JobName=mine")
    run.reaches(run.step() + 100)
    launcher.kill()
    words = run.wait(run.start(steps=400))
    assert f"re-attached to slurm job {job}" in words and "submitted" not in words, words
    assert len(run.starts()) == 1 and run.read("done.json") == expected(400)


def test_authentication_that_is_away_at_submission(run):
    """munge is restarted on the login node: the job is submitted when it is back."""
    run.slurm.stop_daemon("munged")
    try:
        launcher = run.start(steps=50)
        seen = []
        wait_for(lambda: seen.append(launcher.stderr.readline()) or "for now" in seen[-1], 180)
        assert "takes no job for now; trying again" in seen[-1], seen
    finally:
        run.slurm.start_daemon("munged")
    run.wait(launcher)
    assert len(run.jobs()) == 1
    run.undisturbed(50)
