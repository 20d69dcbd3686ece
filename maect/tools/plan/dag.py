"""What is left to run: the commands that Snakemake would run now, asked of Snakemake itself."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import maect
from maect.core.errors import UserError

COMMAND = "Shell command: maect "
SNAKEFILE = Path(maect.__file__).parent.parent / "Snakefile"


def commands_to_run(
    targets: Sequence[str], config: Sequence[str], profile: Path
) -> list[list[str]]:
    """The words of each `maect` command of a dry run, without the `maect`, in any order.

    Args:
        targets: as on Snakemake's command line; none is the whole report.
        config: `KEY=VALUE` pairs for `--config`, with the experiment.
        profile: folder of the cluster profile.

    Raises:
        UserError: Snakemake refuses; its own last line.
    """
    words = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), *targets]
    words += ["--profile", str(profile), "--config", *config, "--dry-run", "--printshellcmds"]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        ours = [line for line in done.stderr.splitlines() if line.startswith("maect: ")]
        said = (ours or lines or [done.stderr.strip() or "Snakemake failed"])[-1]
        raise UserError(said.removeprefix("maect: "))
    return [_words(line.removeprefix(COMMAND)) for line in lines if line.startswith(COMMAND)]


def _words(command: str) -> list[str]:
    """As the shell sees them: `$(dirname PATH)` is the folder, redirections are left out."""
    text = re.sub(r"\$\(dirname (\S+)\)", lambda m: str(Path(m[1]).parent), command)
    words = shlex.split(text)
    return words[: words.index("2>")] if "2>" in words else words
