"""What SLURM, its nodes and their disks can do to a job, for real."""

import signal
import time

import psutil
import pytest
from launching import finish, wait_for
from slurm_cluster import ACCOUNT

pytestmark = pytest.mark.cluster


def test_wall_limit_with_no_launcher_alive(run):
    """The job saves together and puts itself back into the queue; SLURM's own signal."""
    launcher = run.start(steps=150, save_every=1000)
    run.reaches(20)
    run.kill(launcher)
    (job,) = run.jobs()
    run.slurm.run("scancel", "--signal=USR2", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    assert run.returned() == "requeue"
    run.wait(run.start(steps=150, save_every=1000))
    run.undisturbed(
        150, "wall limit while no launcher lives", "saved together, queued itself again"
    )
    assert len(run.jobs()) == 1 and [start["attempt"] for start in run.starts()] == [0, 1]
    assert run.starts()[1]["step"] >= 20


@pytest.mark.slow
def test_three_wall_limits_in_one_training(run):
    """SLURM's own clock: one minute a job, two and a half minutes of work."""
    run.resources["minutes"] = 1
    launcher = run.start(steps=1500, seconds=0.1, save_every=10000)
    run.wait(launcher, 420)
    starts = run.starts()
    limits = len(starts) - 1
    run.undisturbed(1500, f"{limits} wall limits in one training", "saved and queued each time")
    assert limits >= 3 and all(start["step"] > 0 for start in starts[1:])


def test_node_loses_power(run):
    launcher = run.start(steps=150)
    run.reaches(20)
    run.slurm.kill_node("jwb0002")
    # SLURM may requeue the job itself, or end it so that the launcher submits another one.
    wait_for(lambda: run.jobs() != dict.fromkeys(run.jobs(), "RUNNING"), 60)
    run.wait(launcher)
    run.undisturbed(150, "power loss of one of two nodes", "noticed by SLURM; went on elsewhere")
    assert len(run.starts()) == 2 and run.starts()[1]["step"] >= 15


def test_job_that_pends_for_ever_is_reported_with_slurm_s_reason(run):
    tomorrow = ["StartTime=now+1days", "Duration=60", "Nodes=ALL", "Users=root"]
    run.slurm.run("scontrol", "create", "reservation", "ReservationName=later", *tomorrow)
    try:
        run.resources["sbatch"] = ["reservation=later"]
        launcher = run.start(steps=50)
        wait_for(lambda: list(run.jobs().values()) == ["PENDING"])
        time.sleep(4)
        launcher.send_signal(signal.SIGINT)
        words = finish(launcher)
        assert launcher.returncode == 130 and "cancelled at step 0" in words
        assert "PENDING (Reservation)" in words and not run.live() and run.starts() == []
    finally:
        run.slurm.run("scancel", *run.live()) if run.live() else None
        run.slurm.run("scontrol", "delete", "ReservationName=later")
    run.resources["sbatch"] = []
    finish(run.start(steps=50))
    run.undisturbed(
        50, "a reservation that does not come", "`PENDING (Reservation)` shown; Ctrl-C cancelled it"
    )


def test_controller_away_is_no_verdict(run):
    """Nobody can say how the job is: the new launcher waits instead of submitting another."""
    launcher = run.start(steps=250)
    run.reaches(20)
    run.kill(launcher)
    run.slurm.stop_daemon("slurmctld")
    try:
        words = finish(run.start(steps=250))
        assert "submitted" not in words
    finally:
        run.slurm.start_daemon("slurmctld")
    run.undisturbed(250, "slurmctld away when the launcher starts again", "waited for it")
    assert len(run.jobs()) == 1


@pytest.mark.slow
def test_interrupt_while_the_controller_is_away(run):
    """Nobody can cancel the job: it is said, and the next launcher finds it."""
    run.resources["sbatch"] = ["begin=now+1hour"]
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json").get("state") == "submitted" and run.jobs())
    time.sleep(2)  # its launcher has seen it pending
    run.slurm.stop_daemon("slurmctld")
    try:
        launcher.send_signal(signal.SIGINT)
        words = finish(launcher, 400)
    finally:
        run.slurm.start_daemon("slurmctld")
    assert launcher.returncode == 130 and "was not cancelled" in words
    words = run.wait(run.start(steps=50))
    run.undisturbed(
        50, "Ctrl-C while slurmctld is away", "not called cancelled; found by the next start"
    )
    assert len(run.jobs()) == 1 and "re-attached to slurm job" in words


@pytest.mark.slow
def test_controller_away_at_submission(run):
    run.slurm.stop_daemon("slurmctld")
    try:
        launcher = run.start(steps=50)
        wait_for(lambda: "takes no job for now" in launcher.stderr.readline(), 120)
        assert launcher.poll() is None
    finally:
        run.slurm.start_daemon("slurmctld")
    finish(launcher)
    run.undisturbed(50, "slurmctld away at submission", "tried again until it answered")
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
    run.undisturbed(
        100, "slurmdbd away, a rank killed meanwhile", "the controller alone; submitted again"
    )
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
    run.undisturbed(200, "preemption by a higher partition", "SLURM queued the job again; waited")
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
    run.undisturbed(150, "scontrol requeue", "same job id, from the last state")
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
        run.undisturbed(
            150, "full disk", "stopped, naming the full disk; went on once there was space"
        )
