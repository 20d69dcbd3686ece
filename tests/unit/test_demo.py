"""`maect demo`: what is seen first, and the few lines of the rest."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from maect.core.files import read_json, write_json, write_text
from maect.data.bundled import write_digits
from maect.data.index import open_index
from maect.experiment import load
from maect.launch import LaunchError, Task
from maect.launch.owner import lock_folder
from maect.tools import logger
from maect.tools.demo import ASKED, demo
from maect.tools.dry_run import jobs_to_run
from maect.tools.first_look import AFTER, BEFORE, HEAD, NUMBERS, _shard, first_look, table

LOCAL = Path(__file__).parents[2] / "cluster_profiles/local"


@pytest.mark.slow
def test_the_first_look_is_the_pipelines_own_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after are drawn and told; pre-training and head are not computed twice."""
    monkeypatch.chdir(tmp_path)
    digits = Path(__file__).parents[2] / "workflow/experiments/digits.yaml"
    short = digits.read_text(encoding="utf-8").replace(
        "set: &views {crop", "set: &views {epochs: 2, crop"
    )
    write_text(tmp_path / "digits.yaml", short)
    changes = dict(word.split("=") for word in ASKED)
    out = first_look(load("digits.yaml", **changes), {AFTER: 2})
    assert (out / "first_look.png").read_bytes().startswith(b"\x89PNG")
    assert list(read_json(out / NUMBERS)["scores"]) == [BEFORE, AFTER]
    header, before, after = table(out).splitlines()
    assert header.split()[0] == "k-NN" and before.split()[0] == "MAE" and "tuned" in after
    left = jobs_to_run(["encoders"], ["experiment=digits.yaml", *ASKED], LOCAL)
    trained = {job.wildcards["run"] for job in left if "run" in job.wildcards}
    assert trained and not trained & {BEFORE, HEAD}
    assert not {"write_shards"} & {
        job.rule for job in left if job.wildcards.get("split") in ("train", "val")
    }


def test_a_first_look_by_other_settings_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may change a recipe: the pipeline trains anew, and the old table stayed."""
    made = []

    def launch(
        task: Task, folder: Path, *_: object, is_done: Callable[[], bool], **__: object
    ) -> None:
        if not is_done():
            made.append(task.identity)
            write_json(folder / NUMBERS, {"identity": task.arguments.get("identity")})

    monkeypatch.setattr("maect.tools.first_look.launch", launch)
    monkeypatch.chdir(tmp_path)
    digits = Path(__file__).parents[2] / "workflow/experiments/digits.yaml"
    for epochs, times in ((2, 1), (2, 1), (3, 2)):
        views = f"set: &views {{epochs: {epochs}, crop"
        text = digits.read_text(encoding="utf-8").replace("set: &views {crop", views)
        write_text(tmp_path / "digits.yaml", text)
        first_look(load("digits.yaml"))
        assert len({*made}) == len(made) == times


def test_no_first_look_beside_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs would take a run from each other, again and again."""
    monkeypatch.chdir(tmp_path)
    with (
        lock_folder(tmp_path / "results/digits"),
        pytest.raises(LaunchError, match="belongs to process"),
    ):
        demo(lambda *_: 0)


def test_digits_that_were_half_written_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in its first second must not end every later demo."""
    monkeypatch.chdir(tmp_path)
    chosen = load("digits")
    write_digits(chosen.root / "images/digits")
    shutil.rmtree(chosen.root / "images/digits/train")
    _shard(chosen, "digits")
    assert open_index(chosen.shards("digits", "train")).n == 1297


def record(event: LogEvent, **about: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"levelno": logging.INFO, "msg": ""})
    made.__dict__.update(about, event=event)
    return made


def test_a_line_for_what_begins_and_one_time_for_all(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(logger.time, "monotonic", lambda: now)
    settings = logger.LogHandlerSettings(terminal=1)
    handler = logger.LogHandler(None, settings)  # type: ignore[arg-type]
    stats = {"pretrain": 1, "tune": 2, "knn": 4, "total": 7}  # 24 + 50 + 6 seconds
    handler.emit(record(LogEvent.RUN_INFO, stats=stats))
    rules = {1: "pretrain", 2: "tune", 3: "tune", 4: "knn", 5: "knn", 6: "knn", 7: "knn"}

    def begin(job: int) -> None:
        message = f"Training {job}"
        told = {"jobid": job, "rule_name": rules[job], "rule_msg": message, "shellcmd": "maect"}
        handler.emit(record(LogEvent.JOB_INFO, **told))

    begin(1)
    now += 48  # twice as slow as on idle cores
    handler.emit(record(LogEvent.JOB_FINISHED, job_id=1))
    begin(2)
    handler.emit(record(LogEvent.JOB_FINISHED, job_id=2))
    begin(3)
    handler.emit(record(LogEvent.JOB_FINISHED, job_id=3))
    for job in (4, 5, 6, 7):
        begin(job)
    handler.emit(record(LogEvent.JOB_ERROR, rule_name="knn", log=["knn.log"]))
    assert capfd.readouterr().out.splitlines() == [
        "    [0/7] Training 1                                  about 80 s left",
        "    [1/7] Training 2                                  about 80 s left",
        "    [2/7] Training 3                                  about 30 s left",
        "    [3/7] Evaluating                                  a few seconds left",
        "knn failed; see knn.log",
    ]


def test_the_terminal_has_the_plugins_lines_and_the_log_has_all(tmp_path: Path) -> None:
    """Snakemake loads the plugin by its name, with the setting of the command line."""
    (tmp_path / "Snakefile").write_text(
        "rule knn:\n    output: 'a'\n    shell: 'echo said; touch {output}'\n"
    )
    with open(tmp_path / "terminal", "wb") as terminal, open(tmp_path / "log", "wb") as log:
        words = ["--logger", "maect", "--logger-maect-terminal", str(terminal.fileno())]
        subprocess.run(
            [sys.executable, "-P", "-m", "maect.tools.start_snakemake", "--cores", "1", *words],
            cwd=tmp_path, stdout=log, stderr=log, pass_fds=[terminal.fileno()], check=True,
        )  # fmt: skip
    shown = (tmp_path / "terminal").read_text()
    assert shown == f"    [0/1] {'Evaluating':<44}a few seconds left\n"
    assert "said" in (tmp_path / "log").read_text() and "rule knn" in (tmp_path / "log").read_text()
