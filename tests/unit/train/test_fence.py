"""A launcher was wrong, and a run has two jobs: only the newest writes, without locks."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from ranks import Place, Ranks, run
from test_resume import ALWAYS, identical, steps_saved

from maect.core.errors import SupersededError
from maect.train import fence as module
from maect.train.checkpoint import Saver
from maect.train.fence import Fence

RECORD = {"fingerprint": "ours"}


class Failed(Exception):
    """What would end the process."""


class Job(Place):
    """One rank that is told how it ends."""

    failure: BaseException | None = None

    def fail(self, error):
        self.failure = error


def test_the_older_job_commits_nothing_and_removes_nothing(tmp_path: Path) -> None:
    tensors = {"param|0|w": torch.zeros(4)}
    first, second = Job(0, 0, 1), Job(0, 0, 1)
    old = Saver(tmp_path, first, Fence(tmp_path / "state", first))
    old.save(1, tensors, RECORD)
    old.wait()
    new = Saver(tmp_path, second, Fence(tmp_path / "state", second))
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


def test_a_job_that_is_taken_over_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Its check came before, its commit comes after."""
    first, second = Job(0, 0, 1), Job(0, 0, 1)
    old = Fence(tmp_path, first)
    old.check()
    Fence(tmp_path, second)
    with pytest.raises(SupersededError, match="another job has taken the run over"):
        old.commit(tmp_path / "state.json", {"step": 1})
    with pytest.raises(SupersededError):
        old.check()
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("ask", [Fence.check, lambda fence: fence.commit(Path("x"), {"step": 1})])
def test_a_job_that_is_taken_over_file_by_file(tmp_path: Path, monkeypatch, ask) -> None:
    """Whoever takes over removes what is in the folder, and then the folder."""
    fence = Fence(tmp_path, Job(0, 0, 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "fsync_path", lambda path: path.unlink())
    with pytest.raises(SupersededError, match="another job has taken the run over"):
        ask(fence)
    assert not Path("x").exists()


def test_a_job_that_is_taken_over_while_it_starts(tmp_path: Path, monkeypatch) -> None:
    real, later = module.uuid.uuid4, []

    def overtaken():
        if not later:
            later.append(None)
            later.append(Fence(tmp_path, Job(0, 0, 1)))
        return real()

    monkeypatch.setattr(module.uuid, "uuid4", overtaken)
    with pytest.raises(SupersededError, match="another job has taken the run over"):
        Fence(tmp_path, Job(0, 0, 1))
    later[1].check()


def test_a_job_that_the_launcher_has_replaced(tmp_path: Path) -> None:
    place = Job(0, 0, 1)
    fence = Fence(tmp_path, place)
    place.is_current = lambda: False
    with pytest.raises(SupersededError, match="replaced this job"):
        fence.check()
    with pytest.raises(SupersededError):
        Fence(tmp_path, place)
    place.is_current = lambda: True
    fence.check()  # who was refused has taken nothing


def test_a_replaced_job_of_other_settings_sets_nothing_aside(job, tmp_path: Path) -> None:
    """It begins late, in the folder of the job that has replaced it."""
    newer, older, log = job("run", "mae", base_lr=2e-3), job("run", "mae"), tmp_path / "log"
    assert run(1, newer, log=log, stop_at=3) == ["requeue"]
    assert "SupersededError" in run(1, older, log=log, superseded=True)
    folder = Path(newer["folder"])
    assert steps_saved(folder) == [3] and not list(folder.glob("stale-*"))
    assert run(1, newer, log=log) == ["done"]


@pytest.mark.parametrize("seen", [[], ["writer-000001"], ["writer-000002"]])
def test_who_sees_the_folder_as_it_was_takes_over_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    """Delayed visibility: a first search shows what was there before two other jobs."""
    before, between = Fence(tmp_path, Job(0, 0, 1)), Fence(tmp_path, Job(0, 0, 1))
    searches = iter([seen])
    real = module.os.listdir
    monkeypatch.setattr(module.os, "listdir", lambda path: next(searches, None) or real(path))
    last = Fence(tmp_path, Job(0, 0, 1))
    for fence in (before, between):
        with pytest.raises(SupersededError):
            fence.commit(tmp_path / "state.json", {"step": 1})
    last.commit(tmp_path / "state.json", {"step": 2})
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 2


def commit_until_superseded(folder: Path, delay: float) -> None:
    time.sleep(delay)
    fence = Fence(folder, Job(0, 0, 1))
    number = int(fence._own.parent.name.removeprefix("writer-"))
    step = 0
    while not (folder / "enough").exists():
        step += 1
        try:
            fence.commit(folder / "record.json", {"writer": number, "step": step})
        except SupersededError:
            return


def test_commits_of_many_jobs_never_go_back(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [
        context.Process(target=commit_until_superseded, args=(tmp_path, 0.05 * (number // 2)))
        for number in range(12)
    ]
    for job in jobs:
        job.start()
    seen = [(0, 0)]
    deadline = time.monotonic() + 120
    while sum(job.is_alive() for job in jobs) > 1 or len(seen) < 50:
        assert time.monotonic() < deadline
        try:
            value = json.loads((tmp_path / "record.json").read_text())
        except FileNotFoundError:
            continue
        seen.append((value["writer"], value["step"]))
    (tmp_path / "enough").touch()
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    assert seen == sorted(seen) and seen[-1][0] >= len(jobs) // 2


def test_two_trainings_on_one_folder_end_as_one(job, tmp_path: Path) -> None:
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
