"""Prints a table as Markdown, LaTeX or plain text (HTML: `page.py`).

Each cell: what was measured, ± deviation over seeds, then the paper's number and the difference.
"""

import math
from dataclasses import dataclass

import pandas as pd

from maect.report.registry import Metric, Table, architecture_title, method_title, table_of

MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """The parts of one cell as text, empty where there is nothing."""

    value: str
    deviation: str
    paper: str
    difference: str


def cell(line: "pd.Series", metric: Metric) -> Cell:
    """One cell, rounded to as many decimals as the paper prints."""

    def text(number: float, form: str) -> str:
        return "" if math.isnan(number) else format(number, form)

    value, paper = float(line[metric.name]), float(line[f"{metric.name}_paper"])
    # The difference is of the printed numbers, so that a reader can check it.
    difference = round(value, metric.digits) - round(paper, metric.digits)
    return Cell(
        value=text(value, f".{metric.digits}f").replace("-", MINUS),
        deviation=text(float(line[f"{metric.name}_std"]), f".{metric.digits}f"),
        paper=text(paper, f".{metric.digits}f").replace("-", MINUS),
        difference=text(difference + 0.0, f"+.{metric.digits}f").replace("-", MINUS),
    )


def shown(frame: pd.DataFrame, table: Table) -> list[Metric]:
    """The columns in which anything was measured or printed; the others would only take room."""
    others = [table.other(name) for name in frame.columns if f"{name}_std" in frame.columns]
    return [
        metric
        for metric in [*table.metrics, *filter(None, others)]
        if frame[[metric.name, f"{metric.name}_paper"]].notna().any(axis=None)
    ]


def table_title(table: Table, metrics: list[Metric]) -> str:
    """The table's title; another one if nothing of the paper's sets is shown."""
    stand_ins = metrics and not any(metric in table.metrics for metric in metrics)
    return table.other_title if stand_ins and table.other_title else table.title


def _titles(line: "pd.Series") -> tuple[str, str]:
    return architecture_title(line["architecture"]), method_title(line["method"])


def _inline(parts: Cell) -> str:
    measured = parts.value + (f" ± {parts.deviation}" if parts.deviation else "")
    if not parts.paper:
        return measured or MISSING
    return f"{measured or MISSING} ({parts.paper}{parts.difference and ', ' + parts.difference})"


def to_markdown(frame: pd.DataFrame, name: str) -> str:
    """A table in GitHub's Markdown, with its title."""
    table = table_of(name)
    metrics = shown(frame, table)
    lines = [
        f"**{table_title(table, metrics)}** (paper: {table.paper}). {legend(metrics, frame)}",
        "",
        f"| Architecture | Method | {' | '.join(m.title for m in metrics)} |",
        f"| --- | --- |{' ---: |' * len(metrics)}",
    ]
    for _, line in frame.iterrows():
        cells = [*_titles(line), *(_inline(cell(line, m)) for m in metrics)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def legend(metrics: list[Metric], frame: pd.DataFrame) -> str:
    """How to read a cell, of the parts that occur."""
    deviations = any(frame[f"{m.name}_std"].notna().any() for m in metrics)
    papers = any(frame[f"{m.name}_paper"].notna().any() for m in metrics)
    text = "Measured" + (" ± standard deviation over seeds" if deviations else "")
    text += " (paper, difference)" if papers else ""
    return f"{text}; {MISSING}: not run."


_LATEX = str.maketrans(
    {
        "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", MINUS: "$-$", MISSING: "--",
        "±": r"$\pm$", "…": r"\dots{}",
    }
)  # fmt: skip


def to_latex(frame: pd.DataFrame, name: str) -> str:
    """A table for LaTeX with the booktabs package."""
    table = table_of(name)
    metrics = shown(frame, table)
    header = ["Architecture", "Method", *(m.title for m in metrics)]
    lines = [
        rf"\begin{{tabular}}{{ll{'r' * len(metrics)}}}",
        r"\toprule",
        " & ".join(text.translate(_LATEX) for text in header) + r" \\",
    ]
    before = None
    for _, line in frame.iterrows():
        architecture, method = _titles(line)
        first = architecture if architecture != before else ""
        lines += [r"\midrule"] if first else []
        before = architecture
        cells = []
        for metric in metrics:
            parts = cell(line, metric)
            text = parts.value or MISSING
            for extra in (
                f"±{parts.deviation}" if parts.deviation else "",
                f"({parts.paper}{parts.difference and ', ' + parts.difference})"
                * bool(parts.paper),
            ):
                text += rf" {{\scriptsize {extra}}}" if extra else ""
            cells.append(text.replace("+", "$+$"))
        escaped = [text.translate(_LATEX) for text in (first, method, *cells)]
        lines.append(" & ".join(escaped) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_text(frame: pd.DataFrame, name: str) -> str:
    """A table for a terminal: aligned columns, no escapes."""
    table = table_of(name)
    metrics = shown(frame, table)
    grid = [["", "", *(m.title for m in metrics)]]
    before = None
    for _, line in frame.iterrows():
        architecture, method = _titles(line)
        first = architecture if architecture != before else ""
        before = architecture
        grid.append([first, method, *(_inline(cell(line, m)) for m in metrics)])
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if position < 2 else text.rjust(width)
            for position, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    title = f"{table_title(table, metrics)} (paper: {table.paper})"
    return "\n".join([title, legend(metrics, frame), "", *lines, ""])
