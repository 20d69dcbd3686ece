"""What is left to run, asked of Snakemake: what it logs of a dry run in this process.

Imports Snakemake, which no other command but `maect plan` waits for.
"""

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from snakemake.cli import args_to_api, parse_args
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from maect.core.errors import UserError
from maect.core.files import PIPELINE
from maect.tools.plan import RuleJob

SNAKEFILE = PIPELINE / "Snakefile"


def jobs_to_run(targets: Sequence[str], config: Sequence[str], profile: Path) -> list[RuleJob]:
    """The jobs of a dry run that call a command, in any order.

    Args:
        targets: as on Snakemake's command line; none is the whole report.
        config: `KEY=VALUE` pairs for `--config`, with the experiment.
        profile: folder of the cluster profile.

    Raises:
        UserError: Snakemake refuses; its own last line.
    """
    LoggerPluginRegistry().register_plugin("snakemake_logger_plugin_maect", sys.modules[__name__])
    words = ["--snakefile", str(SNAKEFILE), *targets, "--profile", str(profile), "--dry-run"]
    logging.getLogger("snakemake").propagate = False  # our own handlers would print it
    stderr = io.StringIO()  # "Using profile ...", warnings, what the Snakefile refuses
    try:
        with redirect_stderr(stderr), listening() as heard:
            parser, options = parse_args([*words, "--logger", "maect", "--config", *config])
            done = args_to_api(options, parser)
    except (SystemExit, Exception) as error:
        last = [line for line in stderr.getvalue().splitlines() if line.strip()][-1:]
        raise UserError(*(last or [str(error)])) from None
    if not done:
        raise UserError(heard.errors[-1].splitlines()[-1] if heard.errors else "Snakemake failed")
    return heard.jobs


@dataclass
class Heard:
    """The jobs, and the texts of errors."""

    jobs: list[RuleJob] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


_heard = Heard()


@contextmanager
def listening() -> Iterator[Heard]:
    """What is logged from here on, complete at the end of the block."""
    global _heard
    _heard = Heard()
    yield _heard


class LogHandler(LogHandlerBase):
    """A logger plugin; Snakemake finds the class by its name and makes the handler itself."""

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
            job = RuleJob(about["rule_name"], dict(about["wildcards"]), resources)
            _heard.jobs.append(job)
        elif record.levelno >= logging.ERROR:
            _heard.errors.append(record.getMessage())
