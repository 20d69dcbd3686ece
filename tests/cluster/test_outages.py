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


def test_controller_away_is_no_verdict(run):
    """Nobody can say how the job is: the new launcher waits instead of submitting another."""
    launcher = run.start(steps=400)
    run.reaches(20)
    run.kill(launcher)
    run.slurm.stop_daemon("slurmctld")
    try:
        launcher = run.start(steps=400)
        wait_for(lambda: psutil.Process(launcher.pid).children())  # it asks
        time.sleep(1)
    finally:
        run.slurm.start_daemon("slurmctld")
    assert "submitted" not in finish(launcher)
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
@pytest.mark.parametrize("how", ["preempted", "requeued"])
def test_slurm_puts_the_job_back(run, how):
    """By a partition of a higher priority, or by hand: then no signal to save comes before."""
    launcher = run.start(steps=200)
    run.reaches(20)
    (job,) = run.jobs()
    if how == "preempted":
        urgent = ["sbatch", "-p", "urgent", "-A", ACCOUNT, "-N", "3", "-o", "/dev/null"]
        run.slurm.run(*urgent, "--wrap", "sleep 3")
    else:
        run.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    run.wait(launcher)
    run.undisturbed(200)
    assert len(run.jobs()) == 1 and len(run.starts()) == 2


@pytest.mark.slow
def test_full_disk(run):
    """The run's folder has a file system of its own."""
    run.folder.mkdir()
    run.slurm.run("mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "none", str(run.folder))
    try:
        launcher = run.start(steps=150)
        run.reaches(20)
        filler = run.folder / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(4 << 20))
        words = finish(launcher)
        assert launcher.returncode == 2 and "No space left on device" in words
        assert "Traceback" not in words.replace("said:\nTraceback", "")
        wait_for(lambda: not run.live())
        filler.unlink()
        finish(run.start(steps=150))
        run.undisturbed(150)
    finally:
        run.end()
        run.slurm.run("umount", "--lazy", str(run.folder))
