"""The `maect` command: collects all commands, parses, calls, and makes each error a line."""

import argparse
import atexit
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import maect.answers.commands
import maect.data.commands
import maect.tools.commands
import maect.tools.job_commands
from maect import __version__
from maect.core.commands import Command, Parser, command
from maect.core.errors import UserError
from maect.core.log import command_log
from maect.core.processes import open_closed_streams

log = logging.getLogger(__name__)

OF_THE_SYSTEM = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EIO, errno.EISDIR,
    errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE, errno.ENOENT, errno.ENOMEM,
    errno.ENOSPC, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM, errno.EROFS, errno.ESTALE,
}  # fmt: skip
"""What a disk, a path or its rights may refuse: a line, and no traceback."""


@command(example="completion bash > ~/.local/share/bash-completion/completions/maect")
def completion(shell: Literal["bash", "zsh", "tcsh"]) -> None:
    """Print what completes commands and options in a shell."""
    import shtab

    parser = build_parser()
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for name, sub in action.choices.items():
        sub.fill()
        # Those without a help are hidden; the help lists all in groups of its own.
        about = COMMANDS[name].about.split(". ")[0]
        action._choices_actions.append(action._ChoicesPseudoAction(name, (), about))
        for word in sub._actions:
            if word.type is Path:
                word.complete = shtab.FILE
    print(shtab.complete(parser, shell=shell))


MODULES = (
    maect.tools.commands,
    maect.tools.job_commands,
    maect.answers.commands,
    maect.data.commands,
)
"""Where commands are: every `Command` of these modules is one."""
COMMANDS = {
    thing.name: thing
    for module in MODULES
    for thing in vars(module).values()
    if isinstance(thing, Command)
} | {completion.name: completion}
GROUPS = {
    "first steps": ("demo", "new-experiment", "run", "plan", "status", "show"),
    "use an encoder on images": (
        "embed", "cluster", "search", "duplicates", "predict", "sort", "audit", "compare",
    ),
    "public weights and sharing": (
        "retrieve", "import", "export", "publish",
    ),
    "clusters and upkeep": ("doctor", "clean", "verify", "completion", "schema"),
}  # fmt: skip
"""Commands by what they are for; the others are single jobs of a pipeline."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 2 wrong input, 130 interrupted, 141 nobody reads the output.
    """
    open_closed_streams()
    # At its end the interpreter would search all that was imported for garbage: 0.8 s with torch.
    atexit.register(gc.freeze)
    try:
        try:
            return run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `maect ... | head` has read enough
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def run(arguments: Sequence[str] | None) -> int:
    """Run one command, each of its errors a line; returns the exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    name = options.command
    if rest and not COMMANDS[name].passes_words_on:
        known = [f"--{option.replace('_', '-')}" for option in vars(options)]
        near = get_close_matches(rest[0].partition("=")[0], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"maect {name} --help"
        parser.error(f"{name}: unknown {' '.join(rest)}; {hint}")
    with command_log(getattr(options, "log", None)):
        try:
            return COMMANDS[name].run(options, rest)
        except UserError as error:
            log.error("maect %s: %s", name, error)
            return 2
        except OSError as error:
            if error.errno not in OF_THE_SYSTEM:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            log.error("maect %s: %s%s", name, where, error.strerror)
            return 2
        except RuntimeError as error:
            if "torch" not in sys.modules:  # it did not compute
                raise
            from maect.core.distributed import in_general, memory_fault

            if (said := memory_fault(error)) is None:
                raise
            log.error("maect %s: %s", name, in_general(said))
            return 2
        except KeyboardInterrupt:
            log.error("maect %s: interrupted", name)
            return 130


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their options."""
    parser = Parser(
        prog="maect",
        description="Train, use and evaluate image encoders without labels.",
        listed=in_groups,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"maect {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, of in COMMANDS.items():
        subparsers.add_parser(name, of=of)
    return parser


def in_groups() -> str:
    """List the commands for the help, each with its first sentence."""
    grouped = {name for names in GROUPS.values() for name in names}
    rest = tuple(name for name in COMMANDS if name not in grouped)
    width = max(map(len, COMMANDS))
    lines = []
    for title, names in (GROUPS | {"single jobs, by hand": rest}).items():
        lines.append(f"{title}:")
        for name in names:
            first = COMMANDS[name].about.split(". ")[0].rstrip(".")
            lines.append(f"  {name:{width}}  {first}")
        lines.append("")
    return "\n".join(
        [*lines, "maect COMMAND --help has the options, and the names to choose from."]
    )
