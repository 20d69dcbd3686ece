"""Makes pages when the site is built: the reference of commands, and the notebooks.

mkdocs calls `on_files` and `on_page_markdown` by their names (`hooks` in mkdocs.yml).
"""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MARK = "<!-- commands -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for notebook in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, uri, content=rendered(notebook)))
    return files


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Replace the mark on a page by the help of every command, and link to notebooks' pages."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, commands())
    return markdown.replace(".ipynb)", ".md)")


def rendered(notebook: Path) -> str:
    """Return a notebook's cells as Markdown; lines that begin with `!` are commands."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        is_text = cell["cell_type"] == "markdown"
        parts.append(text if is_text else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Return every command's help as Markdown, in the groups of `maect --help`."""
    from maect.cli import GROUPS, name_of

    parts = []
    for title, functions in GROUPS.items():
        parts.append(f"## {title}")
        for function in functions:
            name = name_of(function)
            parts.append(f"### maect {name}\n\n```text\n{help_of(name)}\n```")
    return "\n\n".join(parts)


def help_of(name: str) -> str:
    """Return what `maect NAME --help` prints, at 100 columns."""
    from maect.cli import main

    os.environ["COLUMNS"] = "100"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([name, "--help"])
    return said.getvalue().strip()
