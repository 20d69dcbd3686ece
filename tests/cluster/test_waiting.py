"""Jobs that wait in SLURM's queue, or for a place in it."""

import signal

import pytest
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


def test_a_limit_on_submitted_jobs_is_waited_for(run):
    change = ("sacctmgr", "-i", "modify", "account", ACCOUNT, "set")
    run.slurm.run(*change, "MaxSubmitJobs=0")
    try:
        launcher = run.start(steps=50)
        wait_for(lambda: str(run.read("job.json").get("ending")).startswith("not accepted"))
        assert "SubmitJob" in run.job().ending
        assert status_of(run.folder, "count", False, clusters()).state == "waiting"
    finally:
        run.slurm.run(*change, "MaxSubmitJobs=-1")
    words = finish(launcher)
    assert "SLURM takes no job for now" in words
    assert len(run.jobs()) == 1 and not run.job().earlier
    run.undisturbed(50)


def test_a_held_job_is_named_with_its_cure(run):
    run.resources["slurm_extra"] = "--begin=now+1hour"
    launcher = run.start(steps=50)
    wait_for(lambda: run.state() == "submitted")
    job = run.job().id
    run.slurm.run("scontrol", "hold", job)
    wait_for(lambda: f"`scontrol release {job}`" in launcher.stderr.readline())
    run.slurm.run("scontrol", "release", job)
    run.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    words = run.wait(launcher)
    assert "scontrol release" not in words and len(run.jobs()) == 1, words
    run.undisturbed(50)
