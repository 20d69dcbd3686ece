"""What a run is computed by is on record, compared when it resumes, and said in the terminal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks import run

from maect.core.files import read_record, write_record
from maect.launch import record
from maect.launch.launcher import _Launch
from maect.launch.progress import ProgressLine
from maect.launch.worker import Rank, RankFile
from maect.records import RunRecord
from maect.train.attempts import Attempt, note_attempt

SEEN: dict[str, Any] = {
    "step": 0, "revision": "a", "versions": {"torch": "2.0", "maect": "1"}, "ranks": 2,
    "ranks_a_node": 2,
    "threads": 2, "device": "one", "instructions": "AVX2", "environment": {}, "compiled": True,
    "computing": {"attention": "sdpa"},
}  # fmt: skip


def attempt(**changes: Any) -> Attempt:
    return Attempt.model_validate(SEEN | changes)


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "revision": ({"revision": "b"}, "revision b, it was a: the result may differ"),
    "versions": ({"versions": {"torch": "2.1", "maect": "1"}}, "torch 2.1, it was 2.0"),
    "ranks": ({"ranks": 1}, "ranks 1, it was 2"),
    "threads": ({"threads": 1}, "threads 1, it was 2"),
    "device": ({"device": "another"}, "device another, it was one"),
    "instructions": ({"instructions": "DEFAULT"}, "instructions DEFAULT, it was AVX2"),
    "environment": (
        {"environment": {"ONEDNN_MAX_CPU_ISA": "AVX2"}},
        "ONEDNN_MAX_CPU_ISA AVX2, it was not set",
    ),
    "compiled": ({"compiled": False}, "compiled False, it was True"),
    "nodes": ({"ranks_a_node": 1}, "ranks_a_node 1, it was 2"),
    "settings": ({"computing": {"attention": "flash_attn"}}, "attention flash_attn, it was sdpa"),
}


def test_another_machine_between_kill_and_resume(tmp_path):
    """Audit 6: another revision, version, CPU, limit, threads, compiler or setting: one line."""
    for name, (changes, said) in CHANGED.items():
        folder = tmp_path / name
        folder.mkdir()
        write_record(folder / "recipe.json", {"fingerprint": "f"})
        assert note_attempt(folder, attempt()) == []
        same = SEEN["computing"] | {"compile": True}  # asked for, and so compiled as before
        assert note_attempt(folder, attempt(step=4, computing=same)) == []
        (line,) = note_attempt(folder, attempt(step=9, **changes))
        assert line.startswith(f"resumes with {said}") and "\n" not in line
        history = read_record(folder / "recipe.json")["attempts"]
        assert [entry["step"] for entry in history] == [0, 9]
        assert note_attempt(folder, attempt(step=12, **changes)) == []
        assert len(note_attempt(folder, attempt(step=15))) == 1  # and back
        # What was computed after a state that the run goes back to counts no more.
        assert note_attempt(folder, attempt(step=4)) == []
        assert [e["step"] for e in read_record(folder / "recipe.json")["attempts"]] == [0]


def resume(told: dict[str, Any], log: Path, **options: Any) -> str:
    """What the log of a rank says that resumes and stops after a step."""
    assert run(1, told, log=log, stop_at=4, **options) == ["requeue"]
    return log.read_text()


def edit(folder: str, **changes: Any) -> None:
    """What an attempt on another machine would have noted."""
    path = Path(folder) / "recipe.json"
    told = read_record(path)
    (first,) = told["attempts"]
    write_record(path, told | {"attempts": [first | changes]})


def test_another_revision_and_cpu_and_more_threads(half, tmp_path):
    """Audit 6: real resumes say what was edited into the record, and keep both in the history.

    With `--cpus 2` in place of 1 a resume computes with one thread, as it began.
    """
    edit(half["folder"], revision="0f5cb94", instructions="VSX", device="a loom")
    said = resume(half, tmp_path / "log", cpus=2)
    for name, before in (("revision", "0f5cb94"), ("instructions", "VSX"), ("device", "a loom")):
        assert f"resumes with {name} " in said and f", it was {before}: " in said
    assert "1 thread a rank, as before, for the same bits, although 2 would do" in said
    history = read_record(Path(half["folder"]) / "recipe.json")["attempts"]
    assert [(entry["step"], entry["threads"]) for entry in history] == [(0, 1), (3, 1)]
    assert history[1]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert run(1, half, log=tmp_path / "log") == ["done"]
    finished = read_record(RunRecord.path(Path(half["folder"])))
    assert finished["attempts"] == history


def uncompiled(context: Any, **job: Any) -> str:
    """A training where nothing can be compiled."""
    from ranks import train

    def refuse(*_: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler\nat all")

    torch.compile = refuse
    return str(train(context, **job))


def test_a_compiler_that_is_gone(stopped, tmp_path):
    """Audit 6: `compile: true` where nothing compiles: recorded, said, and said at the resume."""
    told = stopped[1]("mae", "mae", folder=tmp_path / "runs", compile=True)
    told["function"] = uncompiled
    assert "nothing can be compiled here (no compiler): computed without" in resume(
        told, tmp_path / "log"
    )
    (entry,) = read_record(tmp_path / "runs/mae/recipe.json")["attempts"]
    assert entry["compiled"] is False
    edit(told["folder"], compiled=True)
    (tmp_path / "log").write_text("")
    assert run(1, told, log=tmp_path / "log", stop_at=6) == ["requeue"]
    assert "resumes with compiled False, it was True" in (tmp_path / "log").read_text()


def test_the_terminal_says_it(tmp_path, caplog):
    """Audit 6: what a rank says to people is shown by the launcher, each sentence once.

    Also after SLURM has begun the job again: as many as before the requeue were left out.
    """
    job = record.Job("local", "maect-x-1", 1)
    record.make_job_folder(tmp_path, job.name)
    file = RankFile(tmp_path, job.name, 0, 0)
    nothing: Any = None
    rank = Rank(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, cpus=1, gpus=False,
        folder=tmp_path, name=job.name, attempt=0, file=file,
    )  # fmt: skip
    caplog.set_level("INFO", "maect")
    line = ProgressLine("train")
    launcher = _Launch(nothing, tmp_path, nothing, nothing, line, nothing)
    launcher.show_job_messages(job)
    rank.say("resumes with threads 1, it was 2")
    launcher.show_job_messages(job)
    rank.say("resumes with revision b, it was a")
    launcher.show_job_messages(job)
    launcher.show_job_messages(job)
    said = ["train: resumes with threads 1, it was 2", "train: resumes with revision b, it was a"]
    assert caplog.messages == said
    file = RankFile(tmp_path, job.name, 0, 1)
    rank = replace(rank, attempt=1, file=file, said=[])
    rank.say("resumes with device H200, it was A100")
    launcher.show_job_messages(job)
    launcher.show_job_messages(job)
    assert caplog.messages[2:] == ["train: resumes with device H200, it was A100"]


def test_an_attempt_on_a_lost_node_reports_no_more(tmp_path):
    """SLURM takes its node for dead and starts the job again, under the same id and name."""
    record.make_job_folder(tmp_path, "job")
    old = RankFile(tmp_path, "job", 0, 0)
    old.note(saved=3)
    new = RankFile(tmp_path, "job", 0, 1)
    new.note(saved=3, meeting={"attempt": 1})
    old.note(durable=False, progress={"step": 9})
    old.note(end="error")
    report = record.rank_0(tmp_path, record.Job("slurm", "job", 2))
    assert (report.attempt, report.meeting, report.end) == (1, {"attempt": 1}, None)
    new.note(end="done")
    assert record.verdict(tmp_path, record.Job("slurm", "job", 2)) == "done"
