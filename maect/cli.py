"""The `maect` command: typed functions in groups; each of their errors is one line."""

import atexit
import gc
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError

from maect import __version__
from maect.answers import commands as answers
from maect.core.errors import UserError, memory_fault, out_of_memory_advice, reason
from maect.core.log import command_log, is_watched
from maect.core.resources import RENAMED
from maect.data import commands as data
from maect.tools import commands as tools
from maect.tools.evaluate import evaluate, features
from maect.tools.train import import_weights, train

log = logging.getLogger(__name__)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what completes commands and options in a shell.

    `maect completion bash > ~/.local/share/bash-completion/completions/maect`

    Args:
        shell: the shell that you use.
    """
    print(build_app().generate_completion(shell=shell))


GROUPS: dict[str, tuple[Callable[..., int | None], ...]] = {
    "First steps": (
        tools.demo, tools.tune, tools.new_experiment, tools.run, tools.plan, tools.status,
        tools.show,
    ),
    "Use an encoder on images": (
        answers.embed, answers.cluster, answers.search, answers.duplicates, answers.predict,
        answers.sort, tools.compare,
    ),
    "Public weights and sharing": (
        data.retrieve, import_weights, answers.export, answers.publish,
    ),
    "Clusters and upkeep": (
        tools.doctor, tools.clean, tools.verify, completion, tools.schema,
    ),
    "Single jobs, by hand": (
        tools.resolve, data.shard, train, features, evaluate, tools.page,
    ),
}  # fmt: skip
"""Commands by what they are for."""
QUIET_SECONDS = 1.0
"""Time after which a command says what it does: imports alone may take several seconds."""
BEGINS_WITH_A_LINE = ("demo", "train", "features", "evaluate")
"""Commands that say so themselves."""


def name_of(function: Callable[..., Any]) -> str:
    """Return a command's name: its function's, with hyphens; `import` is a word of Python."""
    if function is import_weights:
        return "import"
    return function.__name__.replace("_", "-")


@cache
def build_app() -> App:
    """Make the application of all commands."""
    app = App(
        name="maect",
        help="Train, use and evaluate image encoders without labels.",
        version=f"maect {__version__}",
        group_commands=Group("Options", sort_key=len(GROUPS)),
        help_format="plaintext",  # Markdown, which fills lines, takes a tenth of a second
        default_parameter=Parameter(
            negative=(), show_default=False, consume_multiple=True, json_list=False, json_dict=False
        ),
    )
    for number, (title, functions) in enumerate(GROUPS.items()):
        group = Group(title, sort_key=number)
        for place, function in enumerate(functions):
            app.command(
                function, name=name_of(function), group=group, sort_key=place,
                help_format="markdown",
            )  # fmt: skip
    return app


def public_encoders() -> list[str]:
    """Return the names of public encoders."""
    from maect.answers.public import PUBLIC

    return list(PUBLIC)


def about_sources() -> str:
    """Return a line for each kind of source of images, as Markdown."""
    from maect.data.sources import SOURCES

    lines = [f"- {name}: {source.about}" for name, source in SOURCES.items()]
    return "\n".join(["Sources:", *lines]).replace("*", r"\*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 2 wrong input, 130 interrupted, 141 nobody reads the output.
    """
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
    words = sys.argv[1:] if arguments is None else list(arguments)
    app = build_app()
    name = words[0] if words and words[0] in app else ""
    if name in ("train", "features", "evaluate"):
        words = [_renamed(word) for word in words]
    if not {"--help", "-h"}.isdisjoint(words):
        if name in ("embed", "tune"):
            app[name].help_epilogue = f"Public encoders: {', '.join(public_encoders())}"
        elif name == "shard":
            app[name].help_epilogue = about_sources()
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except UserError as error:
        print(f"maect {name}: {error}", file=sys.stderr)
        return 2
    except UnknownCommandError as error:
        # The library's message goes on with all commands.
        print(f"maect: {str(error).partition(' Available')[0]} See maect --help.", file=sys.stderr)
        return 2
    except CycloptsError as error:
        print(f"maect {name}: {error} See maect {name} --help.", file=sys.stderr)
        return 2
    with command_log(_log_file(bound)), _announced(name):
        try:
            return command(*bound.args, **bound.kwargs) or 0
        except UserError as error:
            log.error("maect %s: %s", name, error)
            return 2
        except BrokenPipeError:
            raise
        except OSError as error:  # what a disk, a path or its rights refuse
            where = f"{error.filename}: " if error.filename is not None else ""
            log.error("maect %s: %s%s", name, where, reason(error))
            return 2
        except MemoryError:
            log.error("maect %s: too little memory; end other programs, or use fewer threads", name)
            return 2
        except RuntimeError as error:
            if (said := memory_fault(error)) is None:
                raise
            log.error("maect %s: %s", name, out_of_memory_advice(said))
            return 2
        except KeyboardInterrupt:
            log.error("maect %s: interrupted", name)
            return 130


def _renamed(word: str) -> str:
    """Return an option of version 0.2.0 by its name now, and any other word as it is."""
    option, equals, value = word.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    if not option.startswith("--") or name not in RENAMED:
        return word
    return f"--{RENAMED[name].replace('_', '-')}{equals}{value}"


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Print the name of a command that takes longer than `QUIET_SECONDS`."""
    functions = {name_of(function): function for group in GROUPS.values() for function in group}
    about = inspect.getdoc(functions[name]) if name in functions else None
    if about is None or not is_watched() or name in BEGINS_WITH_A_LINE:
        yield
        return
    first, _, _ = about.partition(".")
    message = f"maect {name}: {first[0].lower()}{first[1:]}"
    timer = threading.Timer(QUIET_SECONDS, log.info, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log_file(bound: inspect.BoundArguments) -> Any:
    """Return the file of `--log`, an option of some commands; or None."""
    return bound.arguments.get("log")
