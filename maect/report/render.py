"""Prints tables and claims: as Markdown, LaTeX and pages by templates, and in the terminal.

Each cell: what was measured, ± standard deviation over seeds, then the paper's number and the
difference. Pages read on a phone, in print and in the dark, and need no network.
"""

import base64
import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich import box
from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from maect.core.errors import UserError, entry
from maect.core.files import write_text
from maect.evaluate.outcomes import LEVEL, RESAMPLES
from maect.report.configs import Row, ShownConfig
from maect.report.registry import GLOSSARY, TABLES, Detail, Metric, architecture_title, method_title
from maect.report.tables import build_table, read_table, result_of, write_table

if TYPE_CHECKING:
    from PIL import Image

Column = TypeVar("Column", Metric, Detail)
MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EN DASH}"
INTERVALS = (
    f"Intervals are {LEVEL:g} % by the bootstrap over test images ({RESAMPLES:,} resamples); they "
    "say nothing of other training images."
)


@dataclass(frozen=True)
class Cell:
    """The parts of one cell as text, empty where there is nothing."""

    value: str
    std: str
    paper: str
    difference: str
    anchor: str = ""
    """Where on a page the result behind it is."""

    @property
    def measured(self) -> str:
        """Return the measured value, ± standard deviation."""
        return self.value + (f" ± {self.std}" if self.std else "") or MISSING

    def __str__(self) -> str:
        if not self.paper:
            return self.measured
        return f"{self.measured} ({self.paper}{self.difference and ', ' + self.difference})"


@dataclass(frozen=True)
class Line:
    """One line: the titles of its model, and its cells."""

    architecture: str
    method: str
    cells: list[Cell]


@dataclass(frozen=True)
class Printed:
    """A table as text, whatever the format."""

    name: str
    title: str
    paper: str
    caption: str
    legend: str
    columns: list[str]
    lines: list[Line]

    @property
    def words(self) -> list[str]:
        """Return the titles that a glossary may explain."""
        return [*self.columns, *(line.method for line in self.lines)]


def cell(line: "pd.Series", metric: Metric, anchor: str = "") -> Cell:
    """Return one cell, rounded to as many decimals as the paper prints."""

    def text(number: float, form: str) -> str:
        return "" if math.isnan(number) else format(number, form)

    value = float(line[metric.name])
    paper = float(line[f"{metric.name}_paper"])
    # The difference is of the printed numbers, so that a reader can check it.
    difference = round(value, metric.digits) - round(paper, metric.digits)
    return Cell(
        value=text(value, f".{metric.digits}f").replace("-", MINUS),
        std=text(float(line[f"{metric.name}_std"]), f".{metric.digits}f"),
        paper=text(paper, f".{metric.digits}f").replace("-", MINUS),
        difference=text(difference + 0.0, f"+.{metric.digits}f").replace("-", MINUS),
        anchor=anchor,
    )


def text_cell(line: "pd.Series", detail: Detail) -> Cell:
    """Return a text cell: our value and the paper's."""
    value = line[detail.name]
    paper = line[f"{detail.name}_paper"]
    return Cell("" if pd.isna(value) else value, "", "" if pd.isna(paper) else paper, "")


def _known(frame: pd.DataFrame, columns: Iterable[Column]) -> list[Column]:
    """Return the columns in which anything was measured or printed."""
    parts = ((one, frame[[one.name, f"{one.name}_paper"]]) for one in columns)
    return [one for one, part in parts if part.notna().any(axis=None)]


def printed(
    frame: pd.DataFrame,
    name: str,
    rows: Sequence[Row] = (),
    evaluations: Path = Path(),
    compare: bool = True,
) -> Printed:
    """Return a table as text.

    With the rows it was built from, each number has the anchor of its result. With `compare` it
    says where it is in the paper.
    """
    table = entry(name, TABLES, "table")
    others = [table.other(name) for name in frame.columns if f"{name}_std" in frame.columns]
    metrics = _known(frame, [*table.metrics, *filter(None, others)])
    details = _known(frame, table.details)
    runs = {(row.architecture, row.method): row.runs for row in rows}

    def anchor(line: "pd.Series", metric: Metric) -> str:
        method = line["method"]
        names = table.evaluations_of(metric, method)
        own = runs.get((line["architecture"], method), ())
        # In the order in which `build_table` looks for the number.
        for key, name, run in itertools.product(metric.sources(method), names, own):
            if result_of(evaluations, run, (name,), key):
                return f"{run}-{name}"
        return ""

    stand_ins = metrics and not any(metric in table.metrics for metric in metrics)
    return Printed(
        name=name,
        title=table.other_title if stand_ins and table.other_title else table.title,
        paper=table.paper if compare else "",
        caption=table.about(compare),
        legend=_legend(metrics, frame),
        columns=[*(detail.title for detail in details), *(metric.title for metric in metrics)],
        lines=[
            Line(
                architecture_title(line["architecture"]),
                method_title(line["method"]),
                [
                    *(text_cell(line, detail) for detail in details),
                    *(cell(line, metric, anchor(line, metric)) for metric in metrics),
                ],
            )
            for _, line in frame.iterrows()
        ],
    )


def _legend(metrics: list[Metric], frame: pd.DataFrame) -> str:
    """Return how to read a cell, of the parts that occur."""
    spread = any(frame[f"{m.name}_std"].notna().any() for m in metrics)
    papers = any(frame[f"{m.name}_paper"].notna().any() for m in metrics)
    missing = any(frame[m.name].isna().any() for m in metrics)
    text = "Measured" + (" ± standard deviation over seeds" if spread else "")
    text += " (paper, difference)" if papers else ""
    return f"{text}; {MISSING}: not run." if missing else f"{text}."


def _by_architecture(lines: Iterable[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Group consecutive lines of the same architecture."""
    for architecture, group in itertools.groupby(lines, lambda line: line.architecture):
        yield architecture, list(group)


_TEX = str.maketrans(
    {
        "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", MINUS: "$-$", MISSING: "--",
        "±": r"$\pm$", "…": r"\dots{}", "≈": r"$\approx$", "†": r"$\dagger$",
    }
)  # fmt: skip


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("maect.report"),
        autoescape=select_autoescape(["html"], default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["by_architecture"] = _by_architecture
    environment.globals["glossary"] = GLOSSARY
    # A hyphen that no line ends at: narrow columns broke "k-NN".
    environment.filters["whole"] = lambda text: text.replace("k-NN", "k\N{NON-BREAKING HYPHEN}NN")
    environment.filters["tex"] = lambda text: text.translate(_TEX)
    environment.filters["tex_number"] = lambda text: text.translate(_TEX).replace("+", "$+$")
    return environment


def render(table: Printed, form: str) -> str:
    """Render a table as `md` (GitHub's Markdown) or `tex` (LaTeX with booktabs)."""
    return render_page(f"table.{form}", **vars(table), MISSING=MISSING)


def render_page(template: str, **values: Any) -> str:
    """Render a template; a page needs no other file."""
    return _environment().get_template(template).render(**values)


def verdicts(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the parts of the claims' page: summary, decided statements, open statements.

    A verdict that rests on one seed says so, and is counted apart.
    """
    words = {
        "holds": "hold",
        "fails": "fail",
        "holds in one seed": "hold in one seed",
        "fails in one seed": "fail in one seed",
        "within noise": "within noise",
        "not comparable": "not comparable",
    }
    decided: list[dict[Any, Any]] = []
    not_measured: list[dict[Any, Any]] = []
    for line in frame.to_dict("records"):
        if line["verdict"] == "not measured":
            not_measured.append(line)
        else:
            decided.append(line)
        by_paper, on_plain = line["paper_verdict"], line["plain_knn"]
        notes = {"yes": ["beyond chance"], "one seed": ["others may differ"]}
        line["notes"] = notes.get(line["significant"], [])
        if by_paper not in ("", "holds"):
            line["notes"].append(f"{by_paper} by the paper's own numbers")
        if on_plain not in ("", line["verdict"]):
            line["notes"].append(f"{on_plain} by k-NN on features as they are")
        if line["significant"] == "one seed" and line["verdict"] in ("holds", "fails"):
            line["verdict"] += " in one seed"
    counts = Counter(line["verdict"] for line in decided)
    counted = [
        f"{counts[verdict]} {verdict if counts[verdict] == 1 else plural}"
        for verdict, plural in words.items()
        if counts[verdict]
    ]
    order = list(words)
    return {
        "summary": f"{len(decided)} of {len(frame)} statements could be decided"
        + (": " + ", ".join(counted) if decided else ""),
        "decided": sorted(decided, key=lambda line: order.index(line["verdict"])),
        "open": not_measured,
    }


def matrices(
    frame: pd.DataFrame,
    titles: Mapping[str, str],
    tables: str,
    cell: Callable[[Any], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return a table for each folder or data set: rows encoders, columns measures, of strings.

    Args:
        frame: a line for each number, with `encoder`, `measure` and the column `tables`.
        titles: of the measures, in order; one without a number in a table has no column there.
        tables: `folder` or `dataset`.
        cell: what a line of the frame shows: `value`, `more`, and whether it is the `best`.
    """
    empty = {"value": "", "more": "", "best": False}
    shown = []
    for name, part in frame.groupby(tables, sort=False):
        measures = [one for one in titles if one in set(part["measure"])]
        cells = {(line.encoder, line.measure): cell(line) for line in part.itertuples()}
        rows = [
            {"encoder": encoder, "cells": [cells.get((encoder, one), empty) for one in measures]}
            for encoder in dict.fromkeys(part["encoder"])
        ]
        columns = [titles[one] for one in measures]
        shown.append({"title": name, "columns": columns, "rows": rows})
    return shown


def for_terminal(table: Printed) -> Group:
    """Return a table to print with rich, which plain output shows without escapes."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", ""):
        grid.add_column(column, overflow="fold")
    for column in table.columns:
        grid.add_column(Text(column), justify="right", overflow="fold")
    for architecture, lines in _by_architecture(table.lines):
        for number, line in enumerate(lines):
            first = "" if number else architecture
            grid.add_row(*map(Text, (first, line.method, *map(str, line.cells))))
    where = f" (paper: {table.paper})" if table.paper else ""
    return Group(Text(table.title + where), Text(table.legend), grid)


def make_table(path: Path) -> None:
    """`maect page tables/NAME.yaml`: beside it NAME as CSV, Markdown and LaTeX."""
    config = ShownConfig.of_results(path)
    frame = build_table(
        config.name, config.rows, config.evaluations, config.compare_with_paper, config.runs
    )
    write_table(frame, path.with_suffix(".csv"))
    text = printed(frame, config.name, compare=config.compare_with_paper)
    for form in ("md", "tex"):
        write_text(path.with_suffix(f".{form}"), render(text, form))


def show(root: Path) -> None:
    """`maect show`: the tables of a results folder, and where everything is."""
    if not root.is_dir():
        raise UserError(f"{root}: no such results folder")
    # Cells are wrapped to fit a terminal, and nowhere else.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    for path in sorted(root.glob("tables/*.csv")):
        print(path)
        config = path.with_suffix(".yaml")
        compare = not config.exists() or ShownConfig.read(config).compare_with_paper
        console.print(for_terminal(printed(read_table(path), path.stem, compare=compare)))
    figures = (path for path in sorted(root.glob("figures/*.png")) if "." not in path.stem)
    others = [*figures, *root.glob("report.html")]
    for path in others:
        print(path)
    if not others and not any(root.glob("tables/*.csv")):
        raise UserError(f"{root}: no table or figure; name the folder of an experiment's results")


def data_uri(image: bytes, kind: str) -> str:
    """Return an image as the source of an `img`."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def small_jpeg(picture: "Image.Image", side: int) -> str:
    """Make a picture small, at most `side` pixels; return it as the source of an `img`."""
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=85)
    return data_uri(stream.getvalue(), "jpeg")
