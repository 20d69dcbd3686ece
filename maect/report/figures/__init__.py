"""The figures: each a function from what is shown to a drawing, named by its registry entry.

Of several seeds the first is drawn where a figure shows one model; rows that have nothing to show
are left out.
"""

from pathlib import Path
from pkgutil import resolve_name

from maect.report.config import ShownConfig
from maect.report.figures.style import save, styled
from maect.report.registry import named_figure


def draw(shown: ShownConfig, pdf: Path, png: Path) -> None:
    """Draw a figure to two files.

    Raises:
        UserError: no such figure, nothing to draw, or a result that cannot be read.
    """
    function = resolve_name(f"maect.report.figures.{named_figure(shown.name).draw}")
    with styled():
        save(function(shown), pdf, png)
