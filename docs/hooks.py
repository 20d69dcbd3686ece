"""Makes pages when the site is built: references of commands and settings, notebooks, all tables.

mkdocs calls `on_files` and `on_page_markdown` by their names (`hooks` in mkdocs.yml).
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and one of all tables for each published experiment."""
    for notebook in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, uri, content=rendered(notebook)))
    for folder in published(Path(config.docs_dir)):
        uri = f"results/{folder.name}/all_tables.md"
        files.append(File.generated(config, uri, content=all_tables(folder)))
    return files


def published(docs: Path) -> list[Path]:
    """Return the folders of published experiments that have tables."""
    return sorted(path.parent for path in docs.glob("results/*/tables"))


def all_tables(folder: Path) -> str:
    """Return every table of a published experiment as Markdown, each with a link to its CSV."""
    from maect.report.registry import TABLES
    from maect.report.render import printed, render
    from maect.report.tables import read_table

    parts = [f"# All tables of {folder.name}"]
    for name in TABLES:
        path = folder / f"tables/{name}.csv"
        if path.exists():
            text = render(printed(read_table(path), name), "md")
            parts.append(f"## {TABLES[name].title}\n\n{text}\n[CSV](tables/{name}.csv)")
    return "\n\n".join(parts) + "\n"


def links_to_tables() -> str:
    """Return a sentence with links to the pages of all tables."""
    folders = published(Path(__file__).parent)
    links = (f"[{folder.name}]({folder.name}/all_tables.md)" for folder in folders)
    return f"All tables as pages: {', '.join(links)}."


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Replace the marks on a page by what is generated, and link to notebooks' pages."""
    for mark, generate in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, generate())
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
    """Return every command's help as Markdown, without the title."""
    from maect.cli import build_app

    return build_app().generate_docs().partition("\n")[2]


def evaluations() -> str:
    """Return a table of the settings of every protocol."""
    from maect.evaluate import PROTOCOLS

    return "\n\n".join(settings_table(name, model) for name, model in PROTOCOLS.items())


def stages() -> str:
    """Return a table of the settings of every stage."""
    from maect.stages import STAGES

    return "\n\n".join(settings_table(name, model) for name, model in STAGES.items())


def settings_table(name: str, model: Any) -> str:
    """Return a section with a row for each field of a settings class: its default and meaning."""
    lines = [f"### {name}", "", "| setting | default | meaning |", "| --- | --- | --- |"]
    for field, info in model.model_fields.items():
        default = (
            "needed" if info.is_required() else f"`{info.get_default(call_default_factory=True)}`"
        )
        lines.append(f"| `{field}` | {default} | {meaning(model, field)} |".replace("``", ""))
    return "\n".join(lines)


def meaning(model: Any, field: str) -> str:
    """Return the docstring of a field, of the nearest class that has one, in one line."""
    for base in model.__mro__:
        if base.__module__.startswith("maect."):
            members = package()[base.__module__.removeprefix("maect.")][base.__name__].members
            if field in members and members[field].docstring:
                return " ".join(members[field].docstring.value.split()).replace("|", "\\|")
    return ""


@cache
def package() -> Any:
    """Return the package as griffe reads it, which knows docstrings of fields."""
    return griffe.load("maect")


MARKS: dict[str, Callable[[], str]] = {
    "<!-- commands -->": commands,
    "<!-- evaluations -->": evaluations,
    "<!-- stages -->": stages,
    "The site has all tables as pages.": links_to_tables,
}
"""What is generated for each mark on a page."""
