"""`job.json`: damaged is damaged, absent is absent, old is read."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import sealed, write_json, write_record
from maect.launch import clusters
from maect.launch.record import (
    Job,
    RankReport,
    failure,
    has_live_rank,
    lock_while_alive,
    make_job_folder,
    new_job,
    progress,
    rank_file,
    ranks,
    read_job,
    saved_step,
    write_job,
)
from maect.launch.state import state_of

DONE = {"cluster": "local", "name": "maect-x-1", "ranks": 2, "step": 0, "attempt": 3}
DONE |= {"state": "ended", "id": "4", "ending": "done", "earlier": []}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job("slurm", "maect-x-1", 2, 20, {"function": "a:b", "cpus": 1}, progress={"step": 30})
    write_job(tmp_path, job)
    return job


def test_what_is_written_is_read(tmp_path: Path, job: Job) -> None:
    assert read_job(tmp_path) == job
    assert read_job(tmp_path / "nothing") is None


def test_any_damage_is_named_in_one_line(tmp_path: Path, job: Job) -> None:
    file = tmp_path / "job.json"
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        for damage in (
            content[:position],
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :],
        ):
            file.write_bytes(damage)
            try:
                assert read_job(tmp_path) == job  # a space more or less
            except UserError as error:
                assert str(error).startswith(f"{file}: damaged (") and "\n" not in str(error)
                assert "delete the file and start again" in str(error)


@pytest.mark.parametrize("value", [[], 3, {}, {"name": 1}, DONE | {"state": "??"}, DONE])
def test_what_is_no_record_is_refused(tmp_path: Path, value: object) -> None:
    if value != DONE and isinstance(value, dict):
        value = sealed(value)
    write_json(tmp_path / "job.json", value)
    with pytest.raises(UserError, match="damaged"):
        read_job(tmp_path)


def test_another_format_is_refused(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maect.core.files.FORMAT", 2)
    write_job(tmp_path, job)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"job\.json: .*format 2, and this version"):
        read_job(tmp_path)


def test_only_a_saved_step_is_progress(tmp_path: Path, job: Job) -> None:
    make_job_folder(tmp_path, job.name)
    file = rank_file(tmp_path, job.name, 0)
    write_record(file, {"rank": 0, "progress": {"step": 77}})
    assert progress(tmp_path, job)["step"] == 77 and saved_step(tmp_path, job) == 20
    write_record(file, {"rank": 0, "progress": {"step": 77}, "saved": 60})
    assert saved_step(tmp_path, job) == 60
    assert new_job(tmp_path, "slurm", 2, job).step == 60
    # Of a run with other settings it is none: the first job may queue itself again at its limit.
    job.request["identity"] = "before"
    assert new_job(tmp_path, "slurm", 2, job, "before").step == 60
    other = new_job(tmp_path, "slurm", 2, job, "now")
    assert (other.step, other.attempt, other.held) == (0, 1, 0.0)


@pytest.mark.parametrize(
    ("changes", "rank", "outcome"),
    [
        ({"ending": "done"}, {}, "done"),
        ({"ending": "its processes have ended"}, {"end": "done"}, "done"),
        ({"ending": "rank 0 died"}, {}, "lost"),
        ({"ending": "its processes have ended"}, {"end": "requeue"}, "saved"),
        ({"ending": "stopped by the user"}, {"end": "stopped"}, "stopped"),
        ({"ending": "not accepted: no", "id": None}, None, "failed"),
        ({"ending": "rank 0 failed"}, {"end": "error"}, "failed"),
        # What was on record when the job's folder was cleared away.
        ({"ending": "its processes have ended", "verdict": "requeue"}, None, "saved"),
    ],
)
def test_outcomes(tmp_path: Path, job: Job, changes: dict, rank: dict | None, outcome: str) -> None:
    ended = Job(**asdict(job) | {"state": "ended", "id": "7"} | changes)
    if rank is not None:
        make_job_folder(tmp_path, job.name)
        said = {"kind": "RuntimeError", "message": "no", "traceback": "T", "time": 1.0}
        value = {"rank": 0, "end": None} | (said if rank.get("end") == "error" else {}) | rank
        write_record(rank_file(tmp_path, job.name, 0), value)
    state = state_of(tmp_path, ended, clusters())
    assert (state.notice.phase, state.outcome) == ("ended", outcome)


@pytest.mark.parametrize(
    "said",
    [
        "[../pair.cc:525] Connection closed by peer [10.0.0.2]:4321",
        "Socket Timeout",
        "Failed to recv, got 0 bytes. Connection was likely closed.",
    ],
)
def test_who_lost_a_connection_did_not_fail_first(tmp_path: Path, job: Job, said: str) -> None:
    """By the clocks of two nodes, seconds apart, the one that waited was blamed."""
    make_job_folder(tmp_path, job.name)
    errors = [(0, said, 10.0), (1, "CUDA error: uncorrectable ECC error encountered", 12.0)]
    for rank, message, now in errors:
        report = {"rank": rank, "end": "error", "kind": "RuntimeError", "message": message}
        write_record(rank_file(tmp_path, job.name, rank), report | {"time": now, "traceback": ""})
    assert failure(tmp_path, job).rank == 1


def test_a_job_of_another_revision_may_say_more(tmp_path: Path) -> None:
    write_json(tmp_path / "job.json", sealed(DONE | {"mood": "good"}))
    job = read_job(tmp_path)
    assert job is not None and job.name == "maect-x-1"


def test_a_rank_of_another_revision_may_say_more(tmp_path: Path, job: Job) -> None:
    """A job may run for days while maect is changed."""
    make_job_folder(tmp_path, job.name)
    write_record(rank_file(tmp_path, job.name, 1), {"rank": 1, "pid": 7, "mood": "good"})
    write_record(rank_file(tmp_path, job.name, 2), {"mood": "good"})
    assert ranks(tmp_path, job) == {1: RankReport(1, pid=7)}


def test_only_ranks_of_local_jobs_hold_a_lock(tmp_path: Path, job: Job) -> None:
    """By it a launcher in another container sees that the job lives."""
    make_job_folder(tmp_path, job.name)
    for cluster in ("slurm", "local"):
        one = replace(job, cluster=cluster)
        with lock_while_alive(tmp_path, one), lock_while_alive(tmp_path, one):
            assert has_live_rank(tmp_path, one) == (cluster == "local")
    assert not has_live_rank(tmp_path, one)
