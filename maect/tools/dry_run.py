"""Dry run of Snakemake in this process: its reading of words, and the jobs left to run.

Imports Snakemake, which only `maect plan`, and `maect run` with words for it, wait for; import it
by `maect.tools.start_snakemake.import_snakemake` first.
"""

import difflib
import io
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from snakemake.cli import args_to_api, get_argument_parser, parse_args
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from maect.core.errors import UserError, did_you_mean
from maect.core.files import PIPELINE
from maect.core.owners import check_working_folder
from maect.tools.plan import RuleJob

SNAKEFILE = PIPELINE / "Snakefile"
TARGETS = (
    "report", "tables", "figures", "evaluations", "encoders", "shards",
    "claims", "datasets", "images", "summary", "report_html",
)  # fmt: skip
"""Rules that may be asked for by name; anything else is a file."""


def check_words(words: Sequence[str], own: Sequence[str] = ()) -> None:
    """Check that Snakemake knows the words passed to it; `own` options are for the hint.

    Raises:
        UserError: an unknown option or target, an option without its value, or a value of `config`
            that the option of `maect run` would replace.
    """
    parser = get_argument_parser()
    stderr = io.StringIO()
    parser.allow_abbrev = False  # `--delete` would delete all output
    try:
        with redirect_stderr(stderr):
            options, unknown = parser.parse_known_args(list(words))
    except SystemExit as end:
        if not end.code:  # --version
            raise
        raise UserError(stderr.getvalue().splitlines()[-1].partition("error: ")[2]) from None
    known = [name for action in parser._actions for name in action.option_strings]
    for word in unknown:
        near = difflib.get_close_matches(word.partition("=")[0], [*own, *known], n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "see maect run --help and snakemake --help"
        raise UserError(f"unknown option {word}; {hint}")
    if options.config:
        said = " ".join(options.config)
        raise UserError(
            f"{said} as an option of Snakemake (-C, or behind --): it would be dropped; write "
            f"--config {said}, before --"
        )
    check_targets(options.targets)


def check_targets(targets: Sequence[str]) -> None:
    """Refuse a target that is neither a rule nor a file, by a UserError with a hint."""
    for target in targets:
        if "/" not in target and "." not in target and target not in TARGETS:
            raise UserError(f"unknown target {target!r}; {did_you_mean(target, TARGETS)}")


def jobs_to_run(targets: Sequence[str], config: Sequence[str], profile: Path) -> list[RuleJob]:
    """Return the jobs of a dry run that call a command; config is that of `--config`.

    Raises:
        UserError: Snakemake refuses; its own last line.
    """
    check_targets(targets)
    LoggerPluginRegistry().register_plugin("snakemake_logger_plugin_maect", sys.modules[__name__])
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
"""What the handler below has heard since a dry run began: jobs, and texts of errors."""


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
