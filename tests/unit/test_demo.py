"""`maect demo`: the few lines that it prints."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from maect.tools import logger


def record(event: LogEvent, **about: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"levelno": logging.INFO, "msg": ""})
    made.__dict__.update(about, event=event)
    return made


def test_a_line_for_what_begins(capfd: pytest.CaptureFixture[str]) -> None:
    settings = logger.LogHandlerSettings(terminal=1)
    handler = logger.LogHandler(None, settings)  # type: ignore[arg-type]
    handler.emit(record(LogEvent.RUN_INFO, stats={"pretrain": 1, "knn": 2, "table": 1, "total": 4}))
    for job, rule in enumerate(("pretrain", "knn", "knn", "table")):
        told = {"jobid": job, "rule_name": rule, "rule_msg": "Training mae", "shellcmd": "maect"}
        handler.emit(record(LogEvent.JOB_INFO, **told))
        handler.emit(record(LogEvent.JOB_FINISHED, job_id=job))
    handler.emit(record(LogEvent.JOB_ERROR, rule_name="knn", log=["knn.log"]))
    assert capfd.readouterr().out.splitlines() == [
        "    [0/4] Training mae",
        "    [1/4] Evaluating",
        "    [3/4] Drawing tables and figures",
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
    assert (tmp_path / "terminal").read_text() == "    [0/1] Evaluating\n"
    assert "said" in (tmp_path / "log").read_text() and "rule knn" in (tmp_path / "log").read_text()
