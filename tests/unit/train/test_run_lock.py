"""A launcher was wrong, and a run has two jobs: only the newest writes."""

import errno
import fcntl
import time
from pathlib import Path

import pytest
import torch
from ranks import Place, Ranks, alone, run
from test_resume import ALWAYS, identical, steps_saved

from maect.core.errors import SupersededError
from maect.train import run_folder
from maect.train.checkpoint import Saver
from maect.train.run_folder import WRITER_LOCK, RunLock

RECORD = {"fingerprint": "ours"}


class Job(Place):
    """One rank that is told how it ends."""

    failure: BaseException | None = None

    def fail(self, error):
        self.failure = error


def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_the_older_job_commits_nothing_and_removes_nothing(tmp_path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr(run_folder.fcntl, "flock", without_locks)
    tensors = {"param|0|w": torch.zeros(4)}
    first, second = Job(0, 0, 1), Job(0, 0, 1)
    old = Saver(tmp_path, first, RunLock(tmp_path, first))
    old.save(1, tensors, RECORD)
    old.wait()
    new = Saver(tmp_path, second, RunLock(tmp_path, second))
    new.save(2, tensors, RECORD)
    new.wait()
    for step in (2, 3):
        old.save(step, tensors, RECORD)
        old.wait()
    assert isinstance(first.failure, SupersededError) and second.failure is None
    assert steps_saved(tmp_path) == [1, 2]
    new.save(3, tensors, RECORD)
    new.wait()
    assert second.failure is None and steps_saved(tmp_path) == [2, 3]


def test_a_job_that_is_taken_over_in_the_middle_of_a_save(tmp_path):
    """Its check came before, its commit comes after."""
    first, second = Job(0, 0, 1), Job(0, 0, 1)
    old = RunLock(tmp_path, first)
    old.check()
    RunLock(tmp_path, second)
    with pytest.raises(SupersededError, match="another job has taken the run over"):
        old.commit(tmp_path / "state.json", {"step": 1})
    with pytest.raises(SupersededError):
        old.check()
    assert not (tmp_path / "state.json").exists()


def test_a_job_that_the_launcher_has_replaced(tmp_path):
    place = Job(0, 0, 1)
    lock = RunLock(tmp_path, place)
    place.is_current = lambda: False
    with pytest.raises(SupersededError, match="replaced this job"):
        lock.check()
    with pytest.raises(SupersededError):
        RunLock(tmp_path, place)
    place.is_current = lambda: True
    lock.check()  # who was refused has taken nothing


def test_no_rank_of_a_replaced_job_writes(tmp_path):
    """Its folder may have been moved away: it is not made again."""
    place = Job(1, 0, 2)
    place.is_current = lambda: False
    saver = Saver(tmp_path / "gone", place, None)
    saver.save(1, {"param|0|w": torch.zeros(4)}, RECORD)
    saver.wait()
    assert isinstance(place.failure, SupersededError) and not (tmp_path / "gone").exists()


def test_a_replaced_job_of_other_settings_sets_nothing_aside(job):
    """It begins late, in the folder of the job that has replaced it."""
    newer, older = job("run", "mae", epochs=2, base_lr=2e-3), job("run", "mae", epochs=2)
    assert alone(newer, stop_at=3) == ["requeue"]
    with pytest.raises(SupersededError):
        alone(older, superseded=True)
    folder = Path(newer["folder"])
    assert steps_saved(folder) == [3] and not list(folder.glob("stale-*"))
    assert alone(newer) == ["done"]


def test_a_commit_and_a_job_that_takes_over_wait_for_each_other(tmp_path, monkeypatch):
    """The lock is held from the check of whose run it is until the record is written."""
    lock, written = RunLock(tmp_path, Job(0, 0, 1)), []

    def write(path, value):
        with open(tmp_path / WRITER_LOCK) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written.append((path, value))

    monkeypatch.setattr(run_folder, "write_record", write)
    lock.commit(tmp_path / "state.json", {"step": 1})
    assert written == [(tmp_path / "state.json", {"step": 1})]
    with open(tmp_path / WRITER_LOCK) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: held.close())
        RunLock(tmp_path, Job(0, 0, 1))
        assert held.closed


def test_two_trainings_on_one_folder_end_as_one(job, tmp_path):
    """The first one is held at step 4 while the second takes over, and then goes on."""
    whole, shared = job("whole", "mae"), job("shared", "mae") | ALWAYS
    log, gate = tmp_path / "log", tmp_path / "gate"
    assert run(1, whole, log=log) == ["done"]
    first = Ranks(1, [shared], tmp_path / "first", wait_at=4, wait_for=str(gate))
    deadline = time.monotonic() + 240
    while steps_saved(shared["folder"])[-1:] != [3]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = Ranks(1, [shared], tmp_path / "second", wait_at=7, wait_for=str(gate))
    while steps_saved(shared["folder"])[-1:] != [6]:
        assert time.monotonic() < deadline + 240
        time.sleep(0.01)
    gate.touch()
    assert "SupersededError: " in first.finish()
    assert second.finish() == ["done"]
    identical(whole["folder"], shared["folder"])
