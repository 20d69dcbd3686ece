"""What can happen to processes and people; in the end the result is the undisturbed one."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from launching import MAECT_RUN, finish, wait_for
from slurm_run import USUAL

from maect.launch import LaunchError, Resources, Task, launch

pytestmark = pytest.mark.cluster
SETTINGS = {
    "SQUEUE_PARTITION": "develbooster", "SQUEUE_FORMAT": "%j", "SBATCH_ARRAY_INX": "0-2",
    "SBATCH_JOB_NAME": "mine", "SCANCEL_NAME": "mine", "LOGNAME": "nobody", "USER": "nobody",
}  # fmt: skip
"""Of a shell: each made a launcher lose sight of its job, or one job several."""


def test_two_nodes_undisturbed(run, monkeypatch):
    """Also by the shell's settings for SLURM."""
    for key, value in SETTINGS.items():
        monkeypatch.setenv(key, value)
    run.resources |= {"nodes": 2, "devices": 2}
    words = finish(run.start(steps=50))
    run.undisturbed(50)
    starts = [run.starts(rank)[0] for rank in range(4)]
    assert [start["RANK"] for start in starts] == ["0", "1", "2", "3"]
    assert [start["LOCAL_RANK"] for start in starts] == ["0", "1", "0", "1"]
    assert {(start["MASTER_ADDR"], start["WORLD_SIZE"]) for start in starts} == {("jwb0001", "4")}
    assert {start["cuda"] for start in starts} == {"0,1"} and "torch False" in words
    assert int(words.split("peak ")[1].split()[0]) < 60_000
    assert len(run.jobs()) == 1


def test_refused_submission_is_reported_as_it_is(run):
    for change, words in (
        ({"slurm_account": ""}, "Invalid account"),
        ({"slurm_partition": "develbooster", "runtime": 180}, "time limit"),
        ({"devices": 5}, "not available"),
        ({"slurm_extra": "--reservation=nowhere"}, "reservation is invalid"),
    ):
        given = Resources(**(USUAL | change)).resolved()
        with pytest.raises(LaunchError, match=f"(?s)not accepted.*{words}"):
            launch(Task("counting:count"), run.folder, given, is_done=lambda: False, describe="c")
    assert run.live() == []


def test_killed_snakemake_and_launcher_are_followed_by_one_that_reattaches(run, tmp_path):
    first = run.pipeline(tmp_path, steps=400)
    run.reaches(10)
    launcher = psutil.Process(run.read("owner.lock")["pid"])
    first.kill()
    launcher.kill()
    first.wait(30)
    gone, _ = psutil.wait_procs([launcher], timeout=30)
    assert gone and run.live() and run.step() < 400
    assert run.pipeline(tmp_path, steps=400).wait(120) == 0
    run.undisturbed(400)
    assert len(run.jobs()) == 1 and "re-attached to slurm job" in (tmp_path / "log").read_text()


def test_launcher_killed_while_it_submits(run, tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"  # SLURM has the job, and the answer is late
    sbatch.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@"\nsleep 3\n')
    sbatch.chmod(0o755)
    run.resources["slurm_extra"] = "--begin=now+1hour"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        launcher = run.start(steps=50)
    wait_for(run.jobs)
    assert run.read("job.json")["state"] == "submitting"
    run.kill(launcher)
    launcher = run.start(steps=50)
    wait_for(lambda: run.read("job.json")["id"])
    run.wait(launcher)
    run.undisturbed(50)
    assert len(run.jobs()) == 1


def test_killed_rank_ends_the_job_and_the_next_goes_on(run):
    run.resources["nodes"] = 2
    launcher = run.start(steps=60)
    run.reaches(20)
    psutil.Process(run.starts(1)[0]["pid"]).kill()
    words = finish(launcher)
    run.undisturbed(60)
    assert len(run.jobs()) == 2 and "submitting it again" in words
    assert run.starts()[1]["step"] >= 15


def test_cancelled_by_a_person_is_final_until_the_next_start(run):
    launcher = run.start(steps=100, save_every=1000)
    run.reaches(20)
    run.slurm.run("scancel", *run.jobs())
    words = finish(launcher)
    assert launcher.returncode == 2 and "was cancelled by a person" in words
    assert len(run.jobs()) == 1 and not run.live()
    finish(run.start(steps=100, save_every=1000))
    run.undisturbed(100)
    # The ranks had the seconds between SIGTERM and SIGKILL to save.
    assert run.starts()[1]["step"] >= 20


def test_interrupt_of_a_job_that_began_after_squeue_was_asked(run, monkeypatch):
    """It saves and ends, and the next start goes on."""
    with monkeypatch.context() as patch:
        patch.setenv("MAECT_SQUEUE_SECONDS", "300")
        run.resources["slurm_extra"] = "--begin=now+1hour"
        launcher = run.start(steps=100, save_every=1000)
    assert any("PENDING" in line for line in launcher.stderr)
    run.slurm.run("scontrol", "update", f"jobid={run.job().id}", "starttime=now")
    run.reaches(20)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "saved and stopped" in words
    wait_for(lambda: not run.live())
    run.resources["slurm_extra"] = ""
    finish(run.start(steps=100, save_every=1000))
    run.undisturbed(100)
    assert len(run.jobs()) == 2 and run.starts()[1]["step"] >= 20


@pytest.mark.slow
def test_a_driver_in_a_job_asks_to_save_before_its_time_limit(run, tmp_path):
    """The script of docs/cluster.md."""
    command = run.command({"steps": 10**6, "save_every": 10**6}, run.resources)
    script, log = tmp_path / "driver.sh", tmp_path / "log"
    line = shlex.join([sys.executable, "-c", MAECT_RUN, *command])
    script.write_text(f"#!/bin/bash\n#SBATCH --signal=B:TERM@90\nexec {line}\n")
    words = ["sbatch", "--account=maect", "--time=2", f"--output={log}", str(script)]
    subprocess.run(words, env=run.environment(), check=True)
    run.reaches(20)
    wait_for(lambda: "saved and stopped at step" in log.read_text(), 150, pause=0.5)
    wait_for(lambda: not run.live())
    assert run.saved() >= 20
