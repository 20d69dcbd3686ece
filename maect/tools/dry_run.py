"""Dry run of Snakemake in this process: the jobs left to run.

Imports Snakemake, which only `maect plan` waits for; import it by
`maect.tools.start_snakemake.import_snakemake` first.
"""

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path

from snakemake.cli import args_to_api, parse_args
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from maect.core.errors import UserError
from maect.core.files import PIPELINE
from maect.core.owners import check_working_folder
from maect.tools.plan import RuleJob

SNAKEFILE = PIPELINE / "Snakefile"


def jobs_to_run(targets: Sequence[str], config: Sequence[str], profile: Path) -> list[RuleJob]:
    """Return the jobs of a dry run that call a command; config is that of `--config`.

    Raises:
        UserError: Snakemake refuses; its own last line.
    """
    plugin = import_module(__name__)
    LoggerPluginRegistry().register_plugin("snakemake_logger_plugin_maect", plugin)
    check_working_folder()
    words = ["--snakefile", str(SNAKEFILE), *targets, "--dry-run", "--workflow-profile", "none"]
    words += ["--profile", str(profile / "config.yaml")]
    logging.getLogger("snakemake").propagate = False  # our own handlers would print it
    stderr = io.StringIO()  # "Using profile ...", warnings, what the Snakefile refuses
    JOBS.clear()
    ERRORS.clear()
    try:
        with redirect_stderr(stderr):
            parser, options = parse_args([*words, "--logger", "maect", "--config", *config])
            done = args_to_api(options, parser)
    except (SystemExit, Exception) as error:
        last = [line for line in stderr.getvalue().splitlines() if line.strip()][-1:]
        raise UserError(*(last or [str(error)])) from None
    if not done:
        raise UserError(ERRORS[-1].splitlines()[-1] if ERRORS else "Snakemake failed")
    return [*JOBS]


JOBS: list[RuleJob] = []
ERRORS: list[str] = []
"""Messages that the handler below heard since a dry run began: jobs, and errors."""


class LogHandler(LogHandlerBase):
    """A logger plugin; Snakemake finds the class by its name and makes the handler itself."""

    writes_to_stream = True  # else Snakemake would print as well
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def emit(self, record: logging.LogRecord) -> None:
        """Record the jobs that Snakemake plans."""
        about = record.__dict__
        if about.get("event") == LogEvent.JOB_INFO and about["shellcmd"]:
            resources = dict(about["resources"].items())
            JOBS.append(RuleJob(about["rule_name"], dict(about["wildcards"]), resources))
        elif record.levelno >= logging.ERROR:
            ERRORS.append(record.getMessage())
