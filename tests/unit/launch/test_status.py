"""`maect status` on the folders of real jobs."""

import os
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from launching import ROOT, Run, finish, kill, wait_for
from rich.console import Console

from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.experiment import load
from maect.launch import clusters, record
from maect.launch.slurm import Slurm
from maect.launch.state import Notice
from maect.records import RunRecord, line_of
from maect.tools.status import Status, columns, show, state_and_note, status, terminal_table


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "experiment" / "runs" / f"count{os.getpid()}-{time.monotonic_ns()}")
    yield run
    run.end()


@pytest.fixture
def finished(tmp_path):
    """Folder of a finished pre-training of an experiment in `tmp_path`."""
    folder = tmp_path / "digits/runs/mae_tiny"
    about = {"run": "mae_tiny", "stage": "pretrain", "fingerprint": "before"}
    write_record(RunRecord.path(folder), about | {"images_per_second": 9.0})
    return folder


def line_for(run) -> str:
    """The run's line and its note."""
    lines = columns(status(run.folder.parents[1])[1])
    first = next(i for i, line in enumerate(lines) if line.startswith("count"))
    return "\n".join(lines[first:])


def test_running_interrupted_failed_stopped(run):
    launcher = run.start(steps=2000)
    run.reaches(20)
    timing = {"held_seconds": 200.0, "useful_seconds": 194.9, "device_seconds": 200.0}
    (run.folder / "metrics.jsonl").write_text(line_of(1, {"loss": 1.0}, timing))
    words = line_for(run).split()
    job = run.read("job.json")["id"]
    assert words[1] == "running" and words[-2:] == ["local", job] and "0.5000" in words
    assert " 97 % " in line_for(run)
    assert {"second", "seconds", "minutes"} & {*words}, "no time left"
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    kill(run.processes())
    assert "interrupted" in line_for(run) and "died" in line_for(run)
    finish(run.start(complain="the images are gone"))
    assert "failed" in line_for(run) and "the images are gone" in line_for(run)
    before = run.step()
    launcher = run.start(steps=2000)
    wait_for(lambda: run.step() > before)
    launcher.send_signal(signal.SIGINT)
    finish(launcher)
    assert "stopped" in line_for(run)
    write_record(
        RunRecord.path(run.folder), {"run": "r", "stage": "tune", "images_per_second": 123.4}
    )
    done = line_for(run)
    assert "tune" in done and "done" in done and "100 %" in done and " 123 " in done


def test_a_limit_of_slurm_is_no_failure(tmp_path):
    """The launcher waits until the queue takes a job, and the line said *failed* meanwhile."""
    for ending, state in (("not accepted for now: MaxSubmitJobs", "waiting"), ("no", "failed")):
        job = record.Job("slurm", "maect-x-1", 1, state="ended", ending=ending)
        assert state_and_note(tmp_path, job, clusters())[0] == state


def test_a_retraining_that_waits_is_not_done(finished, monkeypatch):
    """What was finished is set aside only once the job of the new recipe has begun."""

    class Pending(Slurm):
        def poll(self, folder, job):
            return Notice("pending", "Priority")

    monkeypatch.setattr("maect.tools.status.clusters", lambda: {"slurm": Pending()})
    for identity, state in (("now", "waiting"), ("before", "done")):
        job = record.Job("slurm", "x", 16, identity=identity, state="submitted", id="4711")
        record.write_job(finished, job)
        line = status(finished.parents[1])[1][0]
        assert (line.state, line.part) == (state, 1.0 if state == "done" else None)


def test_runs_that_have_not_begun_and_evaluations(tmp_path):
    root = tmp_path / "digits"  # the bundled experiment of this name
    with pytest.raises(UserError, match="no runs there"):
        status(tmp_path / "nothing")
    (root / "evaluations" / "mae_tiny").mkdir(parents=True)
    (root / "evaluations" / "mae_tiny" / "knn.json").write_text("{}")
    for name in ("knn", "umap"):  # whose jobs have left their folders
        job = record.Job("local", "maect-x-1", 1, state="ended", ending="no")
        record.write_job(root / f"evaluations/mae_tiny/{name}.job", job)
    head, lines = status(root)
    count = len(load("digits").runs)
    assert f"{count} runs: {count} not started; 1 evaluation done" in head
    assert [line.name for line in lines[count:]] == ["mae_tiny umap"]
    assert any((line.name, line.stage) == ("ct_min_tiny", "tune") for line in lines)


def test_runs_that_nobody_asked_for_are_a_number(finished, capsys):
    show(finished.parents[1])
    head, _, line = capsys.readouterr().out.splitlines()
    assert "not started (--every lists them)" in head and line.startswith("mae_tiny")
    show(finished.parents[1], every=True)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(load("digits").runs)


def test_names_and_notes_are_whole_for_programs():
    names = [f"ct_min_of_an_encoder_with_{'x' * 90}_{n}" for n in range(2)]
    head, *lines = columns([Status(name, "tune", "failed", note="why " * 40) for name in names])
    assert head.startswith("run")
    assert [line.split()[0] for line in lines[:2]] == names
    assert lines[2:] == [f"{name}: {' '.join(['why'] * 40)}" for name in names]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_state_progress_and_time_left_are_whole_in_a_narrow_terminal(width):
    lines = [
        Status(
            f"ct_min_of_an_encoder_{number}", "pretrain", "interrupted", 0.45, 1678.4, 93_784.0,
            0.5123, 71.2, 0.93, f"slurm {number}23456",
        )
        for number in range(2)
    ]  # fmt: skip
    console = Console(width=width, file=StringIO())
    console.print(terminal_table(lines))
    table = console.file.getvalue().splitlines()
    assert max(map(len, table)) <= width
    for row in (row for row in table if "interrupted" in row):
        assert "45 %" in row and "26.1 hours" in row
    assert sum("interrupted" in row for row in table) == 2
    assert ("ct_min_of_an_encoder_1" in "".join(table)) == (width == 200)


def test_the_last_online_evaluation(finished):
    timing = {"device_seconds": 1.0}
    log = line_of(1, {"loss": 2.0}, timing) + line_of(2, {"loss": 1.0}, timing)
    (finished / "metrics.jsonl").write_text(log)
    assert "k-NN" not in columns(status(finished.parents[1])[1])[0]
    for step, more in ((3, {"online_knn": 30.0}), (4, {"online_knn": 42.25}), (5, {})):
        log += line_of(step, {"loss": 0.5} | more, timing)
    (finished / "metrics.jsonl").write_text(log)
    about, lines = status(finished.parents[1])
    assert about.endswith("online k-NN: on training images")
    head, line, *_ = columns(lines)
    assert "online k-NN" in head and line.split()[-2:] == ["0.5000", "42.2"]


def test_a_log_that_is_not_that_of_the_record(finished):
    log, path = finished / "metrics.jsonl", RunRecord.path(finished)
    log.write_text(line_of(1, {"loss": 2.0}, {"device_seconds": 1.0}))
    write_record(path, read_record(path) | {"log_sha256": sha256_file(log)})
    line = status(finished.parents[1])[1][0]
    assert (line.state, line.loss, line.note) == ("done", 2.0, "")
    log.write_text(log.read_text().replace("2.0", "1.0"))
    line = status(finished.parents[1])[1][0]
    assert (line.state, line.loss) == ("done", None) and f"{log}: damaged" in line.note


def test_the_command_needs_no_torch(run):
    run.folder.mkdir(parents=True)
    record.write_job(run.folder, record.Job("local", "maect-x-1", 1, state="ended", ending="no"))
    code = (
        "import sys; from maect.cli import main; "
        "status = main(['status', *sys.argv[1:]]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    root = str(run.folder.parents[1])
    words = [sys.executable, "-c", code, root]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert run.folder.name[:12] in result.stdout
