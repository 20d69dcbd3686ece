"""The figures: each a function from a `ShownConfig` to a drawing, named by its registry entry.

How all of them look and are written is here: the same bytes for the same numbers. So are their
inputs: results by row, arrays, settings, names of classes, runs and their sources.

Of several seeds the first is drawn where a figure shows one model; rows that have nothing to show
are left out. A figure without anything to draw, or a result that cannot be read, raises a
`UserError`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maect.core.errors import UserError, entry
from maect.core.files import atomic_write, read_record
from maect.records import RunRecord, checked_sha256, is_finished
from maect.report.configs import Row, ShownConfig, group_names, group_numbers
from maect.report.registry import FIGURES, architecture_title, method_title
from maect.report.tables import chain, result_file
from maect.stages import STAGES

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
WORDNET = re.compile(r"n\d{8}")
LEMMAS = "data/_info/imagenet_synset_to_lemma.txt"


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


def row_title(row: Row, rows: Sequence[Row]) -> str:
    """Return how a row is named in a figure: with its architecture where there are several."""
    method = method_title(row.method)
    if len({one.architecture for one in rows}) == 1:
        return method
    return f"{method}, {architecture_title(row.architecture)}"


def result_files(shown: ShownConfig) -> dict[str, Path]:
    """Return the files of arrays of each row's first run, by the row's title.

    Of the evaluations that the figure's entry needs, the first that any row has; a UserError if no
    row has one.
    """
    runs = {row_title(row, shown.rows): row.runs[0] for row in shown.rows if row.runs}
    needs = entry(shown.name, FIGURES, "figure").needs
    for name in needs:
        found = {
            title: result_file(shown.evaluations, run, name, ".safetensors")
            for title, run in runs.items()
        }
        files = {title: path for title, path in found.items() if path is not None}
        if files:
            return files
    raise UserError(f"{shown.name} figure: no run has the evaluation {' or '.join(needs)}")


def setting(result: Path, key: str) -> Any:
    """Read a setting of an evaluation from its result; None without a result."""
    return read_record(result).get("settings", {}).get(key) if result.exists() else None


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read named arrays of a safetensors file."""
    if not path.exists():
        raise UserError(f"{path}: no such file; run the {path.stem} evaluation first")
    checked_sha256(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UserError(f"{path}: has no `{missing[0]}`; run the {path.stem} evaluation again")
    return {name: tensors[name] for name in names}


@cache
def _lemmas() -> dict[str, str]:
    """Read words by WordNet id from the file that comes with timm, without importing timm."""
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    text = (Path(spec.submodule_search_locations[0]) / LEMMAS).read_text(encoding="utf-8")
    pairs = (line.split("\t") for line in text.splitlines() if "\t" in line)
    return {key: words.split(",")[0] for key, words in pairs}


def class_titles(names: Sequence[str]) -> list[str]:
    """Return printed names of classes: WordNet ids by their first word, others by folder."""
    if all(WORDNET.fullmatch(name) for name in names):
        return [_lemmas().get(name, name) for name in names]
    return [name.replace("_", " ") for name in names]


class Classes:
    """Names of class numbers, or of groups where these are shown; without an index the numbers."""

    def __init__(self, shown: ShownConfig) -> None:
        names = read_record(shown.classes)["class_names"] if shown.classes else []
        self._titles = class_titles(names)
        self._groups: np.ndarray | None = None
        if shown.groups is not None:
            self._titles = group_names(shown.groups)
            self._groups = np.array([*group_numbers(shown.groups, names, str(shown.classes)), -1])

    def __getitem__(self, number: int) -> str:
        known = 0 <= number < len(self._titles)
        return self._titles[number] if known else str(number)

    @property
    def are_groups(self) -> bool:
        """Return whether groups are shown."""
        return self._groups is not None

    def of(self, labels: np.ndarray) -> np.ndarray:
        """Return each label, or its group's number; -1: unknown, or none."""
        return labels if self._groups is None else self._groups[labels]


def stage_title(stage: str) -> str:
    """Return how a stage is printed."""
    if stage not in STAGES:
        return stage
    return STAGES[stage].title.format(run="").strip().removesuffix(" of")


def finished_runs(shown: ShownConfig) -> list[RunRecord]:
    """Return the rows' first finished runs and all they started from, sources first."""
    found: dict[str, RunRecord] = {}
    for row in shown.rows:
        for run in row.runs[:1]:
            if is_finished(shown.runs / run):
                found |= {record.run: record for record in reversed(chain(run, shown.runs))}
    return list(found.values())


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
