"""`job.json`: damaged is damaged, absent is absent, old is read."""

from dataclasses import asdict
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import sealed, write_json, write_record
from maect.launch import Resources, Task, clusters
from maect.launch.record import (
    Job,
    RankReport,
    first_error,
    make_job_folder,
    new_job,
    progress,
    rank_file,
    ranks,
    read_job,
    saved_step,
    write_job,
)
from maect.launch.state import notice_of, outcome

DONE = {"cluster": "local", "name": "maect-x-1", "ranks": 2, "step": 0}
DONE |= {"state": "ended", "id": "4", "ending": "done", "earlier": []}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job("slurm", "maect-x-1", 2, 20, "a:b", identity="before")
    write_job(tmp_path, job)
    return job


def test_what_is_written_is_read(tmp_path, job):
    assert read_job(tmp_path) == job
    assert read_job(tmp_path / "nothing") is None


@pytest.mark.parametrize("value", [[], 3, {}, {"name": 1}, DONE | {"state": "??"}, DONE])
def test_what_is_no_record_is_refused(tmp_path, value):
    if value != DONE and isinstance(value, dict):
        value = sealed(value)
    write_json(tmp_path / "job.json", value)
    with pytest.raises(UserError, match=r"job\.json: damaged .*delete the file and start again"):
        read_job(tmp_path)


def test_another_format_is_refused(tmp_path, job, monkeypatch):
    monkeypatch.setattr("maect.core.files.FORMAT", 2)
    write_job(tmp_path, job)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"job\.json: .*format 2, and this version"):
        read_job(tmp_path)


def test_a_job_s_folder_is_its_user_s_alone_and_others_may_begin_jobs_beside_it(tmp_path):
    path = make_job_folder(tmp_path, "job")
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == tmp_path.joinpath("jobs").stat().st_mode & 0o777
    assert path.parent.stat().st_mode & 0o077


def test_only_a_saved_step_is_progress(tmp_path, job):
    make_job_folder(tmp_path, job.name)
    file = rank_file(tmp_path, job.name, 0)
    write_record(file, {"rank": 0, "progress": {"step": 77}})
    assert progress(tmp_path, job)["step"] == 77 and saved_step(tmp_path, job) == 20
    write_record(file, {"rank": 0, "progress": {"step": 77}, "saved": 60})
    assert saved_step(tmp_path, job) == 60
    # Of a run with other settings it is none: the first job may queue itself again at its limit.
    for identity, step in (("before", 60), ("now", 0)):
        job.id = "7"
        asked = Resources(cluster="slurm", devices=4, cpus_per_task=12)
        following = new_job(tmp_path, Task("a:b", {}, identity), asked, job)
        assert (following.step, following.earlier) == (step, ["7"])
        assert (following.ranks, following.cpus, following.gpus) == (4, 12, True)


@pytest.mark.parametrize(
    ("changes", "rank", "how"),
    [
        ({"ending": "done"}, {}, "done"),
        ({"ending": "its processes have ended"}, {"end": "done"}, "done"),
        ({"ending": "rank 0 died"}, {}, "lost"),
        ({"ending": "its processes have ended"}, {"end": "requeue"}, "saved"),
        ({"ending": "stopped by the user"}, {"end": "stopped"}, "stopped"),
        ({"ending": "not accepted: no", "id": None}, None, "failed"),
        ({"ending": "rank 0 failed"}, {"end": "error"}, "failed"),
    ],
)
def test_outcomes(tmp_path, job, changes, rank, how):
    ended = Job(**asdict(job) | {"state": "ended", "id": "7"} | changes)
    if rank is not None:
        make_job_folder(tmp_path, job.name)
        said = {"kind": "RuntimeError", "message": "no", "traceback": "T", "time": 1.0}
        value = {"rank": 0, "end": None} | (said if rank.get("end") == "error" else {}) | rank
        write_record(rank_file(tmp_path, job.name, 0), value)
    notice = notice_of(tmp_path, ended, clusters())
    assert (notice.phase, outcome(tmp_path, ended, notice)) == ("ended", how)


def test_the_first_error_counts_and_a_wrong_input_before_it(tmp_path, job):
    make_job_folder(tmp_path, job.name)
    for rank, kind, now in ((0, "RankError", 12.0), (1, "OSError", 10.0), (2, "UserError", 11.0)):
        report = {"rank": rank, "end": "error", "kind": kind, "time": now}
        write_record(rank_file(tmp_path, job.name, rank), report)
        found = first_error(tmp_path, job)
        assert found is not None and found.rank == rank


def test_a_damaged_report_is_none(tmp_path, job):
    make_job_folder(tmp_path, job.name)
    write_record(rank_file(tmp_path, job.name, 1), {"rank": 1, "time": 7.0})
    write_json(rank_file(tmp_path, job.name, 2), {"rank": 2})
    assert ranks(tmp_path, job) == {1: RankReport(1, time=7.0)}


def test_a_job_of_an_earlier_revision_is_read(tmp_path):
    """Its function was in `request`, and a rank that had no progress said null."""
    job = asdict(Job("slurm", "maect-a-1", 2, id="7", state="submitted", place=str(tmp_path)))
    request = {name: job.pop(name) for name in ("function", "arguments", "identity", "cpus")}
    request |= {"function": "maect.stages.run.train", "identity": "abc"}
    write_record(tmp_path / "job.json", job | {"request": request, "host": "a", "held": 1.0})
    found = read_job(tmp_path)
    assert found.function == "maect.stages.run.train" and not found.computes("other")
    report = rank_file(tmp_path, found.name, 0)
    write_record(report, {"rank": 0, "progress": None})
    assert progress(tmp_path, found) == {}
