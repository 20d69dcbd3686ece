"""The figures: each a function from a `ShownConfig` to a drawing, named by its registry entry.

How all of them look and are written is here: the same bytes for the same numbers.

Of several seeds the first is drawn where a figure shows one model; rows that have nothing to show
are left out. A figure without anything to draw, or a result that cannot be read, raises a
`UserError`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

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
ON_DARK = {"#000000": "#E6E9EF", "#882255": "#B03A78"}
"""Lighter colours in place of those that a dark page would hide."""
MARKERS = ("o", "^", "s", "D")
LINES = ("-", "--", "-.", ":")
WIDTH = 6.8
"""Inches of a page's text, so that the fonts of `STYLE` are printed at their own size."""
STYLE = Path(__file__).with_name("figures.mplstyle")
DARK_STYLE = Path(__file__).with_name("dark.mplstyle")


@contextmanager
def styled(dark: bool = False) -> Iterator[None]:
    """Draw in the project's style alone, for the length of a block or of a decorated function."""
    style = matplotlib.rc_params_from_file(STYLE)
    if dark:
        style.update(matplotlib.rc_params_from_file(DARK_STYLE, use_default_template=False))
    with matplotlib.rc_context(style):
        yield


def ink() -> str:
    """Return the colour of text, which is light on a dark page."""
    return str(matplotlib.rcParams["text.color"])


def paper() -> str:
    """Return the colour of the page."""
    return str(matplotlib.rcParams["figure.facecolor"])


def soft() -> str:
    """Return the colour of explanations, which belong to no model or class."""
    return str(matplotlib.rcParams["axes.edgecolor"])


def themed(color: str) -> str:
    """Return a colour of the palette as it is on this page."""
    return ON_DARK.get(color, color) if paper() != "white" else color


def panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of `rows` x `columns` axes, `height` inches a row, and its axes row by row.

    Not through pyplot: no window system, no state shared with the caller.
    """
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.flat)


def save(figure: Figure, *files: Path) -> None:
    """Write a figure as PDF or PNG, without the date or the versions of the software."""
    no_date = {"pdf": ("CreationDate", "Producer", "Creator"), "png": ("Software",)}
    for file in files:
        form = file.suffix.removeprefix(".")
        with atomic_write(file) as temporary:
            about = dict.fromkeys(no_date[form])
            figure.savefig(temporary, format=form, metadata=about)


def class_style(number: int) -> dict[str, Any]:
    """Return a class's colour and marker for matplotlib; 40 classes before one repeats."""
    turn, place = divmod(number, len(CLASS_COLORS))
    return {"color": themed(CLASS_COLORS[place]), "marker": MARKERS[turn % len(MARKERS)]}


def method_style(number: int) -> dict[str, Any]:
    """Return a method's colour, marker and line; 32 methods before all three repeat."""
    turn = number + number // len(COLORS)
    color, marker = themed(COLORS[number % len(COLORS)]), MARKERS[turn % len(MARKERS)]
    return {"color": color, "marker": marker, "linestyle": LINES[turn % len(LINES)]}


def blank(axes: Axes | Sequence[Axes]) -> None:
    """Take everything off axes that hold a picture or nothing."""
    for one in [axes] if isinstance(axes, Axes) else axes:
        one.set(xticks=[], yticks=[])
        one.grid(False)
        one.spines[:].set_visible(False)


def make_figure(path: Path) -> None:
    """`maect page figures/NAME.yaml`: beside it NAME as PDF and PNG, and for a dark page as PNG."""
    shown = ShownConfig.of_results(path)
    draw(shown, path.with_suffix(".pdf"), path.with_suffix(".png"))
    draw(shown, path.with_suffix(".dark.png"), dark=True)


def draw(shown: ShownConfig, *files: Path, dark: bool = False) -> None:
    """Draw a figure to files; raises as `make_figure`."""
    function = resolve_name(f"maect.report.figures.{entry(shown.name, FIGURES, 'figure').draw}")
    with styled(dark):
        save(function(shown), *files)
