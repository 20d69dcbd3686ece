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


def test_a_job_that_pends_is_reported_with_slurms_reason(run):
    """Its folder's name has a blank: the controller's word is `KEY=VALUE KEY=VALUE ...`."""
    tomorrow = ["StartTime=now+1days", "Duration=60", "Nodes=ALL", "Users=root"]
    run.slurm.run("scontrol", "create", "reservation", "ReservationName=later", *tomorrow)
    run = run.beside("a b", slurm_extra="--reservation=later")
    try:
        launcher = run.start()
        wait_for(lambda: run.read("job.json").get("id"))
        seen = clusters()
        wait_for(lambda: status_of(run.folder, "count", False, seen).state == "waiting")
        wait_for(lambda: "PENDING (Reservation)" in launcher.stderr.readline())
        table = "\n".join(columns([status_of(run.folder, "count", False, seen)]))
        assert f"slurm {run.job().id}" in table and "PENDING (Reservation)" in table
        launcher.send_signal(signal.SIGINT)
        assert "cancelled at step 0" in finish(launcher) and launcher.returncode == 130
        assert not run.live() and run.starts() == []
    finally:
        run.end()
        run.slurm.run("scancel", run.job().id)
        run.slurm.run("scontrol", "delete", "ReservationName=later")


@pytest.mark.parametrize(
    "limit", ["MaxSubmitJobs", pytest.param("GrpSubmitJobs", marks=pytest.mark.slow)]
)
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


@pytest.mark.parametrize("how", ["hold", pytest.param("requeuehold", marks=pytest.mark.slow)])
def test_a_held_job_is_named_with_its_cure(run, how):
    if how == "hold":
        run.resources["slurm_extra"] = "--begin=now+1hour"
    launcher = run.start(steps=200)
    wait_for(lambda: run.state() == "submitted")
    if how == "requeuehold":
        run.reaches(10)
    job = run.job().id
    run.slurm.run("scontrol", how, job)
    seen = []
    wait_for(lambda: seen.append(launcher.stderr.readline()) or "scontrol release" in seen[-1])
    assert f"`scontrol release {job}`" in seen[-1], seen
    time.sleep(3 if how == "requeuehold" else 0)  # credentials of its second are revoked with it
    run.slurm.run("scontrol", "release", job)
    run.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    words = run.wait(launcher)
    assert "scontrol release" not in words and len(run.jobs()) == 1, words
    run.undisturbed(200)


def test_a_renamed_job_is_the_run_s(run):
    """A user who tidies his queue, while the job runs: nothing is submitted beside it."""
    launcher = run.start(steps=300)
    run.reaches(10)
    job = run.job().id
    run.slurm.run("scontrol", "update", f"JobId={job}", "JobName=mine")
    run.reaches(run.step() + 100)
    launcher.kill()
    words = run.wait(run.start(steps=300))
    assert f"re-attached to slurm job {job}" in words and "submitted" not in words, words
    assert len(run.starts()) == 1 and run.read("done.json") == expected(300)


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
