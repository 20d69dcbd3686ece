"""Texts from templates of Jinja."""

from pathlib import Path
from typing import Any


def fill_template(path: Path, **values: Any) -> str:
    """Return the text of a template; jinja2's UndefinedError if it names a value that is missing.

    Tags on lines of their own leave nothing of these lines.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
