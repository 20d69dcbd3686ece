"""What SLURM, its nodes and their disks can do to a job, for real."""

import time

import psutil
import pytest
from launching import finish, wait_for
from slurm_cluster import ACCOUNT

pytestmark = pytest.mark.cluster


def test_wall_limit_with_no_launcher_alive(run):
    """The job saves together and puts itself back into the queue; SLURM's own signal."""
    run.resources["nodes"] = 2
    launcher = run.start(steps=100, save_every=1000)
    run.reaches(20)
    run.kill(launcher)
    (job,) = run.jobs()
    run.slurm.run("scancel", "--signal=USR2", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    assert run.returned() == "requeue"
    run.wait(run.start(steps=100, save_every=1000))
    run.undisturbed(100)
    assert len(run.jobs()) == 1 and [start["attempt"] for start in run.starts()] == [0, 1]
    assert run.starts()[1]["step"] >= 20


@pytest.mark.slow
def test_three_wall_limits_in_one_training(run):
    """SLURM's own clock: one minute a job, two and a half minutes of work."""
    run.resources["runtime"] = 1
    launcher = run.start(steps=1500, seconds=0.1, save_every=10000)
    run.wait(launcher, 420)
    starts = run.starts()
    limits = len(starts) - 1
    run.undisturbed(1500)
    assert limits >= 3 and all(start["step"] > 0 for start in starts[1:])


def test_node_loses_power(run):
    run.resources["nodes"] = 2
    launcher = run.start(steps=150)
    run.reaches(20)
    run.slurm.kill_node("jwb0002")
    # SLURM may requeue the job itself, or end it so that the launcher submits another one.
    wait_for(lambda: run.jobs() != dict.fromkeys(run.jobs(), "RUNNING"), 60)
    run.wait(launcher)
    run.undisturbed(150)
    assert len(run.starts()) == 2 and run.starts()[1]["step"] >= 15


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_controller_away_is_no_verdict(run, is_long):
    """Nobody can say how the job is: the new launcher waits instead of submitting another.

    SLURM's commands try again for a minute by themselves.
    """
    launcher = run.start(steps=400)
    run.reaches(20)
    run.kill(launcher)
    run.slurm.stop_daemon("slurmctld")
    seen = []
    try:
        launcher = run.start(steps=400)
        if is_long:
            wait_for(lambda: seen.append(launcher.stderr.readline()) or "no answer" in seen[-1])
        else:
            wait_for(lambda: psutil.Process(launcher.pid).children())  # it asks
            time.sleep(1)
    finally:
        run.slurm.start_daemon("slurmctld")
    assert "submitted" not in "".join([*seen, finish(launcher)])
    run.undisturbed(400)
    assert len(run.jobs()) == 1


@pytest.mark.slow
def test_accounting_away(run):
    run.slurm.stop_daemon("slurmdbd")
    try:
        launcher = run.start(steps=100)
        run.reaches(20)
        psutil.Process(run.starts(0)[0]["pid"]).kill()
        finish(launcher)
    finally:
        run.slurm.start_daemon("slurmdbd")
    run.undisturbed(100)
    assert len(run.jobs()) == 2


@pytest.mark.slow
def test_preempted_by_a_higher_partition(run):
    launcher = run.start(steps=200)
    run.reaches(20)
    urgent = ["sbatch", "-p", "urgent", "-A", ACCOUNT, "-N", "3", "-o", "/dev/null"]
    run.slurm.run(*urgent, "--wrap", "sleep 3")
    (job,) = run.jobs()
    wait_for(lambda: run.jobs()[job] == "PENDING")
    run.wait(launcher)
    run.undisturbed(200)
    assert len(run.jobs()) == 1 and len(run.starts()) == 2


@pytest.mark.slow
def test_requeued_by_the_administrator(run):
    """No signal to save comes before: the job starts again from its last state."""
    launcher = run.start(steps=150)
    run.reaches(20)
    (job,) = run.jobs()
    run.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    run.wait(launcher)
    run.undisturbed(150)
    assert len(run.jobs()) == 1 and len(run.starts()) == 2


@pytest.mark.slow
def test_full_disk(run):
    with run.small_disk("2m"):
        launcher = run.start(steps=150)
        run.reaches(20)
        filler = run.fill_disk()
        words = finish(launcher)
        assert launcher.returncode == 2 and "No space left on device" in words
        assert "Traceback" not in words.replace("said:\nTraceback", "")
        wait_for(lambda: not run.live())
        filler.unlink()
        finish(run.start(steps=150))
        run.undisturbed(150)
