"""Writes the reference of commands into its page when the site is built (`hooks` in mkdocs.yml)."""

import contextlib
import io
import os
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Replace the mark on a page by the help of every command; mkdocs calls this by its name."""
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """Return every command's help as Markdown, in the groups of `maect --help`."""
    from maect.cli import COMMANDS, GROUPS

    grouped = {name for names in GROUPS.values() for name in names}
    rest = tuple(name for name in COMMANDS if name not in grouped)
    parts = []
    for title, names in (GROUPS | {"single jobs, by hand": rest}).items():
        parts.append(f"## {title.capitalize()}")
        parts += [f"### maect {name}\n\n```text\n{help_of(name)}\n```" for name in names]
    return "\n\n".join(parts)


def help_of(name: str) -> str:
    """Return what `maect NAME --help` prints, at 100 columns."""
    from maect.cli import main

    os.environ["COLUMNS"] = "100"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([name, "--help"])
    return said.getvalue().strip()
