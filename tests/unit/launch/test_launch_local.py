"""Real ranks on this machine, and every way in which they or their launcher can die."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from counting import expected
from launching import MAECT_RUN, Run, finish, kill, wait_for

from maect.launch.owner import TOGETHER, is_snakemake_alive, lock_folder, this_process
from maect.launch.record import LaunchError


def assert_undisturbed(run, steps: int = 40) -> None:
    """The result of a run that was never disturbed, and nothing left behind."""
    assert run.read("done.json") == expected(steps)
    wait_for(lambda: not run.processes(), 20)
    job = run.read("job.json")
    assert job["state"] == "ended" and job["ending"] == "done"


def test_ranks_see_their_place_and_the_launcher_stays_small(run):
    run.resources["devices"] = 2
    run.resources["python"] = f"env INSTEAD=yes {sys.executable}"
    words = finish(run.start())
    assert_undisturbed(run)
    first, second = run.starts(0)[0], run.starts(1)[0]
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert (second["LOCAL_RANK"], first["OMP_NUM_THREADS"]) == ("1", "1")
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["instead"] == "yes"
    assert first["blocks"] == "expandable_segments:True"
    assert first["cuda"] == os.environ.get("CUDA_VISIBLE_DEVICES")
    peak = int(words.split("peak ")[1].split()[0])
    assert peak < 60_000 and "torch False" in words


def test_a_complete_run_starts_nothing_and_begins_at_zero_when_made_again(tmp_path):
    """Its name is cut in that of its job: a file's name has at most 255 bytes."""
    run = Run(tmp_path / ("ä" * 120))
    try:
        finish(run.start(steps=3, save_every=1))
        assert run.read("done.json") == expected(3)
        job = run.job()
        assert job.name.startswith(f"maect-{'ä' * 9}")
        finish(run.start(steps=3, save_every=1))
        assert run.job() == job
        for name in ("done.json", "state.json"):
            (run.folder / name).unlink()
        words = finish(run.start(steps=3, save_every=1))
        assert run.read("done.json") == expected(3) and "at step 0\n" in words
        assert run.job().earlier == [job.id]
    finally:
        run.end()


@pytest.mark.parametrize("moment", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_killed_launcher_is_followed_by_one_that_reattaches(run, moment):
    # Anywhere from its first import through submission into the middle of the job.
    random.seed(moment)
    gate = run.hold(99)  # a job that has ended leaves nothing to attach to
    launcher = run.start(steps=100)
    time.sleep(random.uniform(0.1, 2.5))
    run.kill(launcher)
    launcher = run.start(steps=100)
    owner = run.folder / "owner.lock"
    wait_for(lambda: owner.exists() and f'"pid": {launcher.pid},' in owner.read_text())
    gate.unlink()
    words = finish(launcher)
    assert_undisturbed(run, 100)
    assert len(run.starts()) == 1, words
    assert len({start["name"] for start in run.starts()}) == 1


def test_a_live_job_of_other_settings_is_cancelled(run):
    """By the machine that has it; and neither it nor another job writes over what was put back."""
    first = run.start(steps=10**6, save_every=10**6, identity="before")
    run.reaches(2)
    run.kill(first)
    before, site = run.job().id, run.job().site
    run.change_job(site="elsewhere")
    launcher = run.start(steps=40, identity="after")
    assert "was started on elsewhere" in finish(launcher) and launcher.returncode == 2
    assert len(run.starts()) == 1 and run.processes()
    run.change_job(site=site)
    done = run.folder / "done.json"
    done.write_text("{}")  # of the settings after
    words = finish(run.start(steps=40, identity="after"))
    assert f"cancelled local job {before}: its settings have changed" in words
    assert "submitted" not in words and run.job().state == "ended"
    wait_for(lambda: not run.processes(), 20)
    assert run.read("done.json") == {} and len(run.starts()) == 1
    done.unlink()
    finish(run.start(steps=40, identity="after"))
    assert_undisturbed(run)
    assert run.job().earlier == [before]


def test_a_record_that_was_left_behind_does_not_keep_a_result_from_being_there(run):
    """Its launcher went before the end, and the settings have changed and changed back."""
    finish(run.start(steps=3, identity="before"))
    run.change_job(state="submitted")
    assert "submitted" not in finish(run.start(steps=3, identity="after"))
    (run.folder / "job.json").write_text("{")
    assert "submitted" not in finish(run.start(steps=3, identity="after"))
    assert len(run.starts()) == 1


@pytest.mark.parametrize("started", [2, 1])
def test_launcher_killed_while_it_submits(run, started):
    """Its ranks are found, and go on if all were started; else they would wait for the others."""
    run.resources["devices"] = 2
    launcher, gate = run.start_held(5)
    run.kill(launcher)
    run.change_job(state="submitting", id=None, pids=[])
    if started == 1:
        os.kill(run.starts(1)[0]["pid"], signal.SIGKILL)
    launcher = run.start()
    wait_for(lambda: len(run.starts()) == 3 - started)
    gate.unlink()
    words = finish(launcher)
    assert_undisturbed(run)
    assert len(run.starts()) == 3 - started and run.job().earlier == [], words


@pytest.mark.parametrize("change", [{"name": "another"}, {"state": "ended", "ending": "stopped"}])
def test_job_that_was_replaced_or_given_up_runs_nothing(run, change):
    """It starts late, when nobody could find or cancel it."""
    gate, late = run.folder.with_name("gate"), run.folder.with_name("late-python")
    gate.touch()
    late.write_text(
        f'#!/bin/sh\nwhile [ -e "{gate}" ]; do sleep 0.05; done\nexec "{sys.executable}" "$@"\n'
    )
    late.chmod(0o755)
    run.resources["python"] = str(late)
    launcher = run.start()
    wait_for(lambda: run.state() == "submitted")
    run.kill(launcher)
    name = run.job().name
    run.change_job(**change)
    gate.unlink()
    log = run.folder / "jobs" / name / "local_0_log.out"
    wait_for(lambda: "nothing to do" in log.read_text())
    assert run.starts() == []


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank_does_not_hang_the_others(run, rank):
    run.resources["devices"] = 2
    launcher, gate = run.start_held(21)  # behind the save of step 20
    os.kill(run.starts(rank)[0]["pid"], signal.SIGKILL)
    gate.unlink()
    words = finish(launcher)
    assert_undisturbed(run)
    assert f"rank {rank} died" in words and len(run.starts()) == 2
    assert run.starts()[1]["step"] == 20


def test_everything_killed_at_once(run):
    run.resources["devices"] = 2
    launcher, gate = run.start_held(21)
    run.kill(launcher)
    kill(run.processes())
    gate.unlink()
    finish(run.start())
    assert_undisturbed(run)
    assert [start["step"] for start in run.starts()] == [0, 20]


def test_gives_up_after_three_attempts_with_the_failing_rank_s_error(run):
    launcher = run.start(fail_at=3)
    words = finish(launcher)
    assert launcher.returncode == 2
    # They came to step 2, and none of it was saved.
    assert "gave up after 3 attempts without progress (step 0" in words, words
    assert 'raise RuntimeError(f"step {fail_at} cannot be done")' in words
    assert "_log.out" in words and len(run.starts()) == 3
    assert len(run.read("job.json")["earlier"]) == 2
    assert run.processes() == [] and run.rendezvous_folders() == []


def test_wrong_input_is_not_tried_twice(run):
    launcher = run.start(complain="shards/train: no such folder; run `maect shard` first")
    words = finish(launcher)
    assert launcher.returncode == 2
    assert "\nshards/train: no such folder; run `maect shard` first\n" in words
    assert "Traceback" not in words and run.job().earlier == []


def test_interrupt_saves_stops_and_goes_on_later(run):
    launcher, _ = run.start_held(20, steps=60, save_every=1000)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "saved and stopped at step" in words
    assert run.processes() == [] and run.read("state.json")["step"] == 21
    finish(run.start(steps=60, save_every=1000))
    assert_undisturbed(run, 60)
    assert [start["step"] for start in run.starts()] == [0, 21]


def test_an_interrupt_that_cannot_be_written_cancels(run):
    """On a full disk the job could not save either."""
    launcher = run.start(seconds=600)
    wait_for(run.starts)
    resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (0, 0))
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130
    assert "cannot be asked to save (File too large): cancelled" in words
    assert run.processes() == []


def test_second_interrupt_cancels_at_once(run):
    launcher = run.start(seconds=600)
    wait_for(run.starts)
    launcher.send_signal(signal.SIGTERM)
    wait_for(lambda: run.read("job.json").get("stop"))
    time.sleep(TOGETHER)
    launcher.send_signal(signal.SIGTERM)
    words = finish(launcher, 40)
    assert launcher.returncode == 130 and "cancelled at step 0" in words
    assert run.processes() == []


def test_a_termination_of_the_whole_group_counts_once(run):
    """`timeout 8h maect run`: it reaches a launcher by itself, and again by way of `maect run`."""
    run.hold(20)
    command = run.command({"steps": 150, "gates": str(run.gates), "save_seconds": 1.0}, {})
    with subprocess.Popen(
        [sys.executable, "-c", MAECT_RUN, *command],
        env=run.environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as above:  # fmt: skip
        run.reaches(20)
        os.killpg(above.pid, signal.SIGTERM)
        words = finish(above)
    assert above.returncode == 130 and "saved and stopped at step 21" in words, words
    assert run.processes() == []


def test_a_hang_up_leaves_the_job_running_and_the_folder_to_others(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    launcher, gate = run.start_held(5)
    signal.signal(signal.SIGHUP, before)
    owner = f"process {launcher.pid} on .*, running since"
    with pytest.raises(LaunchError, match=owner), lock_folder(run.folder, patience=0.3):
        pass
    launcher.send_signal(signal.SIGHUP)
    words = finish(launcher)
    assert launcher.returncode == 130 and "detached" in words and len(run.processes()) == 1
    with lock_folder(run.folder, patience=0):
        pass
    gate.unlink()
    finish(run.start())
    assert_undisturbed(run)
    assert len(run.starts()) == 1


def test_signal_at_the_wall_limit_saves_and_submits_again(run):
    run.resources["devices"] = 2
    launcher, gate = run.start_held(20, steps=60, save_every=1000)
    # One rank hears of it first, as in real life.
    os.kill(run.starts(1)[0]["pid"], signal.SIGUSR2)
    gate.unlink()
    words = finish(launcher)
    assert_undisturbed(run, 60)
    assert "saved and returned" in words and len(run.starts()) == 2
    assert run.starts()[1]["step"] >= 20


def test_forgotten_request_to_stop_is_not_obeyed(run):
    launcher, _ = run.start_held(5)
    run.kill(launcher)
    run.change_job(stop=True)
    wait_for(lambda: run.returned() == "stopped")
    finish(run.start())
    assert_undisturbed(run)


def test_a_launcher_whose_record_was_replaced_leaves(run):
    """Two of them started on a file system without locks."""
    launcher, _ = run.start_held(5)
    run.change_job(name="maect-other-1", id="8")
    words = finish(launcher)
    assert launcher.returncode == 2
    assert "names another job, local job 8" in words.splitlines()[-2], words


def test_snakemake_killed(run, tmp_path):
    """The launcher of a killed Snakemake ends; the next Snakemake's waits for that."""
    gate = run.hold(5)
    process = run.pipeline(tmp_path)
    run.reaches(5)
    owner = psutil.Process(run.read("owner.lock")["pid"])
    process.kill()
    process.wait(30)
    gone, _ = psutil.wait_procs([owner], timeout=30)
    assert gone
    status = tmp_path / "status"  # the shell creates it before it writes
    wait_for(lambda: status.exists() and status.read_text())
    assert status.read_text() == "130\n"
    assert "Snakemake is gone" in (tmp_path / "log").read_text()
    assert run.processes() and run.step() == 5
    gate.unlink()
    finish(run.start())
    assert_undisturbed(run)
    assert len(run.starts()) == 1


def test_the_snakemake_of_a_launcher(monkeypatch):
    """It is known by its number and its beginning, whatever becomes of the clock."""
    monkeypatch.setenv("MAECT_SNAKEMAKE", this_process())
    assert is_snakemake_alive()
    pid, began = this_process().split()
    monkeypatch.setenv("MAECT_SNAKEMAKE", f"{pid} {int(began) + 1}")
    assert not is_snakemake_alive()
    with subprocess.Popen(["true"]) as child:
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        began = Path(f"/proc/{child.pid}/stat").read_text().split()[21]
        monkeypatch.setenv("MAECT_SNAKEMAKE", f"{child.pid} {began}")
        assert not is_snakemake_alive(), "it has ended, and nobody has asked how"
    for none in ("", "nonsense", "12", "12 then"):
        monkeypatch.setenv("MAECT_SNAKEMAKE", none)
        assert is_snakemake_alive(), "there is none"


def test_found_job_whose_files_are_gone_runs_again(run):
    """A restarted Snakemake deletes what a job has written that outlived its launcher."""
    launcher, gate = run.start_held(5)
    run.kill(launcher)
    gate.unlink()
    wait_for(lambda: run.read("done.json") and not run.processes())
    (run.folder / "done.json").unlink()
    words = finish(run.start())
    assert_undisturbed(run)
    assert "its files are gone" in words
