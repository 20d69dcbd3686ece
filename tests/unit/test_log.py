"""Messages of commands and of ranks, each in a process of its own: logging is set up once."""

import os
import re
import subprocess
import sys
import warnings

from maect.core import log
from maect.core.log import command_log

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
SPEAK = """
import logging, warnings
log = logging.getLogger("maect.anything")
log.debug("nobody asked")
log.info("step %d", 1)
log.warning("slow disk")
warnings.warn("of numpy")
logging.getLogger("other").info("chatter")
logging.getLogger("other").warning("serious")
log.error("maect shard: no such folder")
"""


def stderr(code: str) -> list[str]:
    """What a process says, whose streams have buffers as a person's."""
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert not done.stdout
    return done.stderr.splitlines()


def test_a_command_s_messages_go_to_terminal_and_log(tmp_path):
    file = tmp_path / "logs/x.log"
    code = f"from maect.core.log import command_log\nwith command_log({str(file)!r}):\n"
    lines = stderr(code + SPEAK.replace("\n", "\n    "))
    assert file.read_text().splitlines() == lines
    kept = [re.sub(TIME, "T", line) for line in lines]
    assert kept[:2] == ["[T] step 1", "[T] warning: slow disk"]
    assert "of numpy" in kept[2]
    assert kept[-2:] == ["[T] warning: serious", "maect shard: no such folder"]
    assert not any("chatter" in line or "nobody" in line for line in kept)


def test_progress_is_said_now_and_then(monkeypatch, caplog):
    caplog.set_level("INFO")
    report = log.progress("photos", 3)
    report(1)
    monkeypatch.setattr(log, "PROGRESS_SECONDS", -1.0)
    report(2)
    assert caplog.messages == ["photos: 2 of 3 images"]


def test_a_name_that_a_terminal_would_obey_is_shown():
    """Anybody may have named a file: this one would rename the window, and clear the screen."""
    code = "import logging\nfrom maect.core.log import command_log\nwith command_log():\n"
    name = r"\x1b]0;a\x07\x9b2Jä.png"
    for call in ("warning", "error"):
        code += f"    logging.getLogger('maect').{call}('{name}')\n"
    lines = stderr(code)
    assert len(lines) == 2 and all(line.endswith(name) for line in lines)


def test_a_rank_s_messages_carry_time_level_and_rank():
    lines = stderr("from maect.core.log import rank_log\nrank_log(3)\n" + SPEAK)
    assert re.fullmatch(f"{TIME} INFO rank 3: step 1", lines[0])
    assert re.fullmatch(f"{TIME} WARNING rank 3: slow disk", lines[1])
    assert re.fullmatch(f"{TIME} ERROR rank 3: maect shard: no such folder", lines[-1])


def test_a_terminal_that_went_away_ends_nothing(tmp_path):
    code = f"""
import logging, os
from maect.core.log import command_log
with command_log({str(tmp_path / "x.log")!r}):
    os.close(2)
    logging.getLogger("maect.x").info("still here")
"""
    assert stderr(code) == []
    assert "still here" in (tmp_path / "x.log").read_text()


def test_nothing_is_left_behind():
    shown = warnings.showwarning
    with command_log():
        assert warnings.showwarning is not shown
    assert warnings.showwarning is shown
