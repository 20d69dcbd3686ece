"""A logger plugin of Snakemake that keeps what it logs of its jobs, instead of printing it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent


@dataclass
class Heard:
    """Rule, wildcards and resources of each job; and the texts of errors."""

    jobs: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


_heard = Heard()


@contextmanager
def listening() -> Iterator[Heard]:
    """What is logged from here on, complete at the end of the block."""
    global _heard
    _heard = Heard()
    yield _heard


class LogHandler(LogHandlerBase):
    """Snakemake finds the class by this name and makes the handler itself."""

    writes_to_stream = True  # else Snakemake would print as well
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is asked for."""
        about = record.__dict__
        if about.get("event") == LogEvent.JOB_INFO and about["shellcmd"]:
            resources = dict(about["resources"].items())
            _heard.jobs.append((about["rule_name"], dict(about["wildcards"]), resources))
        elif record.levelno >= logging.ERROR:
            _heard.errors.append(record.getMessage())
