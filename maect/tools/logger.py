"""Snakemake's logger plugin `maect`: a line for what begins, with the time left.

Snakemake's own lines and those of its jobs go where its standard streams go; the demo sends these
to a file, and names the terminal by `--logger-maect-terminal`.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from maect.core.yaml_files import read_yaml
from maect.evaluate import PROTOCOLS
from maect.stages import STAGES

SECONDS: dict[str, float] = read_yaml(Path(__file__).with_suffix(".yaml"))
OTHER = 1.5
"""Seconds of any other job than those."""
SHOWN = {
    "Preparing images": ("write_images", "write_shards"),
    "Computing vectors": ("features",),
    "Evaluating": tuple(PROTOCOLS),
    "Writing the report": ("report_html",),
}
"""What is said of rules of which many jobs run; a training has a title of its own."""


def seconds(rule: str) -> float:
    """Return the seconds that a job of a rule takes on idle cores."""
    return SECONDS.get(rule, OTHER)


def words(left: float) -> str:
    """Return the time left in words."""
    if left < 10:
        return "a few seconds left"
    if left < 90:
        return f"about {round(left, -1):.0f} s left"
    return f"about {left / 60:.0f} min left"


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    """Settings of the plugin, `--logger-maect-…`; Snakemake finds the class by its name."""

    terminal: int = field(
        default=2, metadata={"help": "file descriptor to print to", "type": int, "required": False}
    )


class LogHandler(LogHandlerBase):
    """The handler of Snakemake's events; Snakemake finds the class by its name."""

    writes_to_stream = False  # Snakemake prints its own lines as well, to its own streams
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        """Begin to count the seconds of jobs, as on idle cores."""
        descriptor = getattr(self.settings, "terminal", 2)
        self.terminal = os.fdopen(descriptor, "w", closefd=False)
        self.began = time.monotonic()
        self.said = ""
        self.total = self.done = 0.0
        self.jobs = self.jobs_done = 0
        self.least = math.inf
        self.running: dict[int, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line for an event of Snakemake, if people need to know of it."""
        about = record.__dict__
        match about.get("event"):
            case LogEvent.RUN_INFO:
                counts: Mapping[str, int] = about["stats"]
                self.total = sum(
                    count * seconds(rule) for rule, count in counts.items() if rule != "total"
                )
                self.jobs = sum(count for rule, count in counts.items() if rule != "total")
            case LogEvent.JOB_INFO if about["shellcmd"]:
                rule = about["rule_name"]
                self.running[about["jobid"]] = seconds(rule)
                self.say(_line_of_job(rule, about["rule_msg"]))
            case LogEvent.JOB_FINISHED:
                self.done += self.running.pop(about["job_id"], 0.0)
                self.jobs_done += 1
            case LogEvent.JOB_ERROR:
                logs = ", ".join(map(str, about["log"]))
                print(f"{about['rule_name']} failed; see {logs}", file=self.terminal, flush=True)

    def say(self, title: str) -> None:
        """Print what begins, once where several jobs do the same."""
        if title != self.said:
            self.said = title
            count = f"[{self.jobs_done}/{self.jobs}]"
            line = f"  {count:>7} {title:<44}{words(self.left())}"
            print(line, file=self.terminal, flush=True)

    def left(self) -> float:
        """Return the seconds still to go, never more than was said before.

        They follow from the pace so far; at first they are those of idle cores.
        """
        elapsed = time.monotonic() - self.began
        pace = max(1.0, elapsed / self.done) if self.done > 5 else 1.0
        self.least = min(self.least, pace * (self.total - self.done))
        return self.least


def _line_of_job(rule: str, message: str | None) -> str:
    """Return the line to print when a job of this rule starts."""
    for title, rules in SHOWN.items():
        if rule in rules:
            return title
    return message if message and rule in STAGES else "Drawing tables and figures"


def register() -> None:
    """Make the plugin known to Snakemake, which looks for installed packages of such names only."""
    name = "snakemake_logger_plugin_maect"
    LoggerPluginRegistry().register_plugin(name, sys.modules[__name__])
