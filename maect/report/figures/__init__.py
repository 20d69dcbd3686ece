"""The figures: each a function from what is shown to a drawing, named by its registry entry.

How all of them look and are written is here: the same bytes for the same numbers.

Of several seeds the first is drawn where a figure shows one model; rows that have nothing to show
are left out. A figure without anything to draw, or a result that cannot be read, raises a
`UserError`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maect.core.errors import entry
from maect.core.files import atomic_write
from maect.report.configs import ShownConfig
from maect.report.registry import FIGURES

# Okabe and Ito's palette, told apart with any kind of colour vision; yellow last (faint on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
# Ten classes are common: wine and olive are as far from these as two more can be. With more classes
# than colours the marker changes too.
CLASS_COLORS = (*COLORS, "#882255", "#7F7F00")
MARKERS = ("o", "^", "s", "D")
LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
WIDTH = 6.8
"""Inches of a page's text, so that the fonts below are printed at their own size."""

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,  # real text in the PDF, not outlines
    "svg.hashsalt": "maect",
    "figure.dpi": 100,
    "savefig.dpi": 200,
}


def styled() -> AbstractContextManager[None]:
    """Context in which figures are made; nothing of the user's own style gets in."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS})


def panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` x `columns` axes, `height` inches a row; the axes row by row.

    Not through pyplot: no window system, no state shared with the caller.
    """
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.flat)


def save(figure: Figure, pdf: Path, png: Path) -> None:
    """Write a figure as PDF and as PNG, without the date or the versions of the software."""
    with atomic_write(pdf) as temporary:
        figure.savefig(
            temporary,
            format="pdf",
            metadata={"CreationDate": None, "Producer": None, "Creator": None},
        )
    with atomic_write(png) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def class_style(number: int) -> tuple[str, str]:
    """Colour and marker of a class; 40 classes before one repeats."""
    colors = len(CLASS_COLORS)
    return CLASS_COLORS[number % colors], MARKERS[number // colors % len(MARKERS)]


def method_style(number: int) -> tuple[str, str, Literal["-", "--", "-.", ":"]]:
    """Colour, marker and line of a method; 32 methods before all three repeat."""
    turn = number + number // len(COLORS)
    return COLORS[number % len(COLORS)], MARKERS[turn % len(MARKERS)], LINES[turn % len(LINES)]


def blank(axes: Axes | Sequence[Axes]) -> None:
    """Take everything off axes that hold a picture or nothing."""
    for one in [axes] if isinstance(axes, Axes) else axes:
        one.set_xticks([])
        one.set_yticks([])
        one.grid(False)
        one.spines[:].set_visible(False)


def make_figure(path: Path) -> None:
    """`maect page figures/NAME.yaml`: beside it NAME as PDF and PNG."""
    shown = ShownConfig.of_results(path)
    draw(shown, path.with_suffix(".pdf"), path.with_suffix(".png"))


def draw(shown: ShownConfig, pdf: Path, png: Path) -> None:
    """Draw a figure to two files; raises as `make_figure`."""
    function = resolve_name(f"maect.report.figures.{entry(shown.name, FIGURES, 'figure').draw}")
    with styled():
        save(function(shown), pdf, png)
