"""Snakemake's logger plugin `maect`: a line for each job that begins.

Snakemake's own lines and those of its jobs go where its standard streams go; the demo sends these
to a file, and names the terminal by `--logger-maect-terminal`.
"""

import logging
import os
from dataclasses import dataclass, field

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from maect.evaluate import PROTOCOLS
from maect.stages import STAGES

SHOWN = {
    "Preparing images": ("write_images", "write_shards"),
    "Computing vectors": ("features",),
    "Evaluating": tuple(PROTOCOLS),
    "Writing the report": ("report_html", "workflow_html"),
}
"""Titles of rules with many jobs; a training has a title of its own."""


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
        """Open the terminal, and begin to count jobs."""
        descriptor = getattr(self.settings, "terminal", 2)
        self.terminal = os.fdopen(descriptor, "w", closefd=False)
        self.said = ""
        self.jobs = 0
        self.jobs_done = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line for an event of Snakemake, if people need to know of it."""
        about = record.__dict__
        match about.get("event"):
            case LogEvent.RUN_INFO:
                self.jobs = about["stats"]["total"]
            case LogEvent.JOB_INFO if about["shellcmd"]:
                self.say(_line_of_job(about["rule_name"], about["rule_msg"]))
            case LogEvent.JOB_FINISHED:
                self.jobs_done += 1
            case LogEvent.JOB_ERROR:
                logs = ", ".join(map(str, about["log"]))
                print(f"{about['rule_name']} failed; see {logs}", file=self.terminal, flush=True)

    def say(self, title: str) -> None:
        """Print the title of a job that begins, once for several jobs of the same title."""
        if title != self.said:
            self.said = title
            count = f"[{self.jobs_done}/{self.jobs}]"
            print(f"  {count:>7} {title}", file=self.terminal, flush=True)


def _line_of_job(rule: str, message: str | None) -> str:
    """Return the line to print when a job of this rule starts."""
    for title, rules in SHOWN.items():
        if rule in rules:
            return title
    return message if message and rule in STAGES else "Drawing tables and figures"
