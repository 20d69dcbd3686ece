"""What is left to run, asked of Snakemake: what it logs of a dry run in this process."""

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maect
from maect.core.errors import UserError

SNAKEFILE = Path(maect.__file__).parent.parent / "Snakefile"


@dataclass(frozen=True)
class RuleJob:
    """A job that Snakemake would run: its rule, and what it is given."""

    rule: str
    wildcards: dict[str, str]
    resources: dict[str, Any]


def jobs_to_run(targets: Sequence[str], config: Sequence[str], profile: Path) -> list[RuleJob]:
    """The jobs of a dry run that call a command, in any order.

    Args:
        targets: as on Snakemake's command line; none is the whole report.
        config: `KEY=VALUE` pairs for `--config`, with the experiment.
        profile: folder of the cluster profile.

    Raises:
        UserError: Snakemake refuses; its own last line.
    """
    # Here, since every other command starts without them.
    from snakemake.cli import args_to_api, parse_args
    from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

    from maect.tools.plan import listener

    LoggerPluginRegistry().register_plugin("snakemake_logger_plugin_maect", listener)
    words = ["--snakefile", str(SNAKEFILE), *targets, "--profile", str(profile), "--dry-run"]
    logging.getLogger("snakemake").propagate = False  # our own handlers would print it
    said = io.StringIO()  # "Using profile ...", what a dry run warns of, what the Snakefile refuses
    try:
        with redirect_stderr(said), listener.listening() as heard:
            parser, options = parse_args([*words, "--logger", "maect", "--config", *config])
            done = args_to_api(options, parser)
    except (SystemExit, Exception) as error:
        last = [line for line in said.getvalue().splitlines() if line.strip()][-1:]
        raise UserError(*(last or [str(error)])) from None
    if not done:
        raise UserError(heard.errors[-1].splitlines()[-1] if heard.errors else "Snakemake failed")
    return [RuleJob(*one) for one in heard.jobs]
