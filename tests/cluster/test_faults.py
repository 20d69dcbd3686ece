"""What can happen to a job on SLURM, for real; in the end the result is the undisturbed one."""

import json
import os
import signal
import subprocess
import time

import pytest
from counting import expected
from launching import finish, kill, wait_for
from slurm_cluster import ACCOUNT

pytestmark = pytest.mark.cluster


def assert_undisturbed(run, steps: int) -> None:
    """The result of a run that was never disturbed; each job accounted for, nothing left behind."""
    assert run.read("done.json") == expected(steps)
    wait_for(lambda: not run.live() and not run.processes())
    assert run.noted() == set(run.jobs()), "a job that job.json does not know"
    starts = [(start["name"], start["attempt"]) for start in run.starts()]
    assert len(set(starts)) == len(starts), "a job ran twice"


def test_two_nodes_undisturbed(run):
    words = finish(run.start(steps=50))
    assert_undisturbed(run, 50)
    starts = [run.starts(rank)[0] for rank in range(4)]
    assert [start["RANK"] for start in starts] == ["0", "1", "2", "3"]
    assert [start["LOCAL_RANK"] for start in starts] == ["0", "1", "0", "1"]
    assert {(start["MASTER_ADDR"], start["WORLD_SIZE"]) for start in starts} == {("jwb0001", "4")}
    assert {start["cuda"] for start in starts} == {"0,1"} and "torch False" in words
    assert int(words.split("peak ")[1].split()[0]) < 60_000


@pytest.mark.parametrize(
    "resources, words",
    [
        ({"account": None}, "Invalid account"),
        ({"partition": "develbooster", "minutes": 180}, "time limit"),
        ({"partition": "nowhere"}, "invalid partition"),
        ({"devices": 5}, "not available"),
    ],
)
def test_refused_submission_is_reported_as_it_is(run, resources, words):
    run.resources |= resources
    launcher = run.start()
    said = finish(launcher)
    assert launcher.returncode == 2 and words in said and "not accepted" in said
    assert run.live() == []


def test_killed_launcher_is_followed_by_one_that_reattaches(run):
    launcher = run.start(steps=200)
    run.reaches(10)
    run.kill(launcher)
    finish(run.start(steps=200))
    assert_undisturbed(run, 200)
    assert len(run.jobs()) == 1


def test_launcher_killed_while_it_submits(run):
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json").get("state") == "submitting" and run.processes())
    run.kill(launcher)
    finish(run.start(steps=50))
    assert_undisturbed(run, 50)
    assert len(run.jobs()) == 1


def test_launcher_and_submission_killed_before_the_submission(run):
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json").get("state") == "submitting" and run.processes())
    run.kill(launcher)
    kill(run.processes())
    assert run.jobs() == {}
    finish(run.start(steps=50))
    assert_undisturbed(run, 50)
    assert len(run.jobs()) == 1 and run.read("job.json")["attempt"] == 2


def test_job_whose_id_was_never_noted_is_found_by_its_name(run):
    run.resources["sbatch"] = ["begin=now+1hour"]
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json").get("state") == "submitted")
    run.kill(launcher)
    # What a crash leaves after sbatch has accepted the job and before its answer is written.
    job = run.read("job.json") | {"state": "submitting", "id": None}
    (run.folder / "job.json").write_text(json.dumps(job))
    (run.folder / "jobs" / job["name"] / "submitted.json").unlink()
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json")["id"])
    run.slurm.release(*run.jobs())
    words = finish(launcher)
    assert_undisturbed(run, 50)
    assert len(run.jobs()) == 1, words


def test_killed_rank_ends_the_job_and_the_next_goes_on(run):
    launcher = run.start(steps=100)
    run.reaches(20)
    os.kill(run.starts(3)[0]["pid"], signal.SIGKILL)
    words = finish(launcher)
    assert_undisturbed(run, 100)
    assert len(run.jobs()) == 2 and "submitting it again" in words
    assert run.starts()[1]["step"] >= 15


def test_wall_limit_with_no_launcher_alive(run):
    """The job saves together and puts itself back into the queue; SLURM's own signal."""
    launcher = run.start(steps=150, save_every=1000)
    run.reaches(20)
    run.kill(launcher)
    (job,) = run.jobs()
    run.slurm.run("scancel", "--signal=USR2", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    assert run.read("verdict.json")["verdict"] == "requeue"
    run.slurm.release(job)
    finish(run.start(steps=150, save_every=1000))
    assert_undisturbed(run, 150)
    assert len(run.jobs()) == 1 and [start["attempt"] for start in run.starts()] == [0, 1]
    assert run.starts()[1]["step"] >= 20


def test_node_loses_power_and_comes_back(run):
    launcher = run.start(steps=150)
    run.reaches(20)
    run.slurm.kill_node("jwb0002")
    # SLURM may requeue the job itself, or end it so that the launcher submits another one.
    wait_for(lambda: run.jobs() != dict.fromkeys(run.jobs(), "RUNNING"), 60)
    for job in run.live():
        run.slurm.release(job)
    finish(launcher, 120)
    assert_undisturbed(run, 150)
    assert len(run.starts()) == 2 and run.starts()[1]["step"] >= 15


def test_cancelled_by_a_person_is_final_until_the_next_start(run):
    launcher = run.start(steps=150, save_every=1000)
    run.reaches(20)
    run.slurm.run("scancel", *run.jobs())
    words = finish(launcher)
    assert launcher.returncode == 2 and "was cancelled by a person" in words
    assert len(run.jobs()) == 1 and not run.live()
    finish(run.start(steps=150, save_every=1000))
    assert_undisturbed(run, 150)
    # The ranks had the seconds between SIGTERM and SIGKILL to save.
    assert run.starts()[1]["step"] >= 20


def test_interrupt_saves_and_ends_the_job(run):
    launcher = run.start(steps=150, save_every=1000)
    run.reaches(20)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "saved and stopped" in words
    wait_for(lambda: not run.live())
    finish(run.start(steps=150, save_every=1000))
    assert_undisturbed(run, 150)
    assert len(run.jobs()) == 2 and run.starts()[1]["step"] >= 20


def test_interrupt_of_a_pending_job_cancels_it(run):
    run.resources["sbatch"] = ["begin=now+1hour"]
    launcher = run.start()
    wait_for(lambda: list(run.jobs().values()) == ["PENDING"])
    time.sleep(3)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "cancelled at step 0" in words
    assert "PENDING (BeginTime)" in words, "SLURM's reason is not shown"
    assert not run.live() and run.starts() == []


def test_controller_away_is_no_verdict(run):
    """Nobody can say how the job is: the new launcher waits instead of submitting another."""
    launcher = run.start(steps=250)
    run.reaches(20)
    run.kill(launcher)
    run.slurm.stop_daemon("slurmctld")
    try:
        words = finish(run.start(steps=250))
        assert run.read("done.json") == expected(250)
    finally:
        run.slurm.start_daemon("slurmctld")
    assert_undisturbed(run, 250)
    assert len(run.jobs()) == 1 and "submitted" not in words


@pytest.mark.slow
def test_controller_away_at_submission(run):
    run.slurm.stop_daemon("slurmctld")
    try:
        launcher = run.start(steps=50)
        wait_for(lambda: list(run.folder.glob("jobs/*/submitted.json")), 90)
        assert launcher.poll() is None
    finally:
        run.slurm.start_daemon("slurmctld")
    words = finish(launcher)
    assert "SLURM does not answer" in words
    assert_undisturbed(run, 50)
    assert len(run.jobs()) == 1


def test_accounting_away(run):
    run.slurm.stop_daemon("slurmdbd")
    try:
        launcher = run.start(steps=100)
        run.reaches(20)
        os.kill(run.starts(0)[0]["pid"], signal.SIGKILL)
        finish(launcher)
        assert_undisturbed(run, 100)
    finally:
        run.slurm.start_daemon("slurmdbd")
    assert len(run.jobs()) == 2


@pytest.mark.slow
def test_preempted_by_a_higher_partition(run):
    launcher = run.start(steps=200)
    run.reaches(20)
    urgent = ["sbatch", "-p", "urgent", "-A", ACCOUNT, "-N", "3", "-o", "/dev/null"]
    run.slurm.run(*urgent, "--wrap", "sleep 3")
    (job,) = run.jobs()
    wait_for(lambda: run.jobs()[job] == "PENDING")
    run.slurm.release(job)
    finish(launcher)
    assert_undisturbed(run, 200)
    assert len(run.jobs()) == 1 and len(run.starts()) == 2


@pytest.mark.slow
def test_requeued_by_the_administrator(run):
    """No signal to save comes before: the job starts again from its last state."""
    launcher = run.start(steps=150)
    run.reaches(20)
    (job,) = run.jobs()
    run.slurm.run("scontrol", "requeue", job)
    wait_for(lambda: run.jobs()[job] == "PENDING")
    run.slurm.release(job)
    finish(launcher)
    assert_undisturbed(run, 150)
    assert len(run.jobs()) == 1 and len(run.starts()) == 2


@pytest.mark.slow
def test_second_pipeline_is_told_who_owns_the_folder(run):
    run.resources["nodes"] = 1
    launcher = run.start(steps=900)
    run.reaches(1)
    second = run.start(steps=900)
    words = finish(second)
    assert second.returncode == 2 and f"belongs to process {launcher.pid} on" in words
    finish(launcher)
    assert_undisturbed(run, 900)
    assert len(run.jobs()) == 1


@pytest.mark.slow
def test_three_wall_limits_in_one_training(run):
    """SLURM's own clock: one minute a job, two and a half minutes of work."""
    run.resources["minutes"] = 1
    launcher = run.start(steps=1500, seconds=0.1, save_every=10000)
    deadline = time.monotonic() + 420
    while launcher.poll() is None:
        assert time.monotonic() < deadline
        for job, state in run.jobs().items():
            if state == "PENDING":
                run.slurm.release(job)
        time.sleep(1)
    assert_undisturbed(run, 1500)
    starts = run.starts()
    assert len(starts) >= 4 and all(start["step"] > 0 for start in starts[1:])


def test_launchers_share_one_question(run):
    """Ten launchers wait; the controller is asked once in the interval, not once for each."""
    others = [type(run)(run.folder.with_name(f"{run.folder.name}-{n}"), run.slurm, nodes=1,
                        sbatch=["begin=now+1hour"]) for n in range(10)]  # fmt: skip
    launchers = [other.start() for other in others]
    try:
        wait_for(lambda: all("PENDING" in other.jobs().values() for other in others))
        cache = next((run.folder.parent / "cache" / "maect").glob("*.json"))
        first = json.loads(cache.read_text())
        wait_for(lambda: json.loads(cache.read_text())["asked"] > first["asked"] + 6)
        last = json.loads(cache.read_text())
        assert 0 < last["queries"] - first["queries"] <= last["asked"] - first["asked"] + 1
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        codes = [launcher.wait(30) for launcher in launchers]
        assert codes == [130] * 10
    finally:
        for other in others:
            other.end()
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout == ""
