"""Makes the page of the clean control: differences, their paired tests, and a figure.

    python docs/results/make_no_lookup.py

It reads what `publish.py collect` wrote of the experiments, and the text in `no_lookup/found.md`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from paired import (
    DATA,
    LOOKUP,
    MAE,
    NONE,
    STOPPED,
    VIEWS,
    Side,
    cell,
    corrected,
    filled,
    number_of_tests,
    published,
)

from maect.core.files import write_text
from maect.report.figures import method_style, panels, save, styled

HERE = Path(__file__).parent
OUT = HERE / "no_lookup"
MEASURES = {
    ("knn", "knn"): "k-NN",
    ("knn", "knn_standardized"): "k-NN, standardised",
    ("low_shot", "low_shot_1"): "1 label a class",
    ("clustering", "accuracy_mean"): "cluster accuracy",
    ("clustering", "nmi_mean"): "clusters, NMI",
}
SHOWN = ("knn", "nmi_mean")
"""Metrics in the page's table."""
COMPARISONS = {
    "neighbours": (STOPPED, LOOKUP, "lookup minus clean control"),
    "gradient": (STOPPED, NONE, "gradient through the positive"),
    "both": (NONE, LOOKUP, "lookup minus older control"),
}


def differences() -> list[dict[str, Any]]:
    """Every comparison of every data set and measure, with Holm's p over those of a data set."""
    rows: list[dict[str, Any]] = []
    for name, experiment in published(list(DATA), HERE):
        found = []
        for comparison, (first, second, _) in COMPARISONS.items():
            for views in VIEWS.values():
                for evaluation, metric in MEASURES:
                    one, other = (Side((kind, views), metric) for kind in (first, second))
                    row = experiment.compare(one, other, evaluation)
                    if row:
                        about = {"data": DATA[name], "comparison": comparison, "views": views}
                        found.append(about | {"metric": metric} | row)
        rows += corrected(found)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each data set, views and measure, a column for each comparison."""
    heads = [title for _, _, title in COMPARISONS.values()]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    known = {(r["data"], r["views"], r["metric"], r["comparison"]): r for r in rows}
    for data in dict.fromkeys(row["data"] for row in rows):
        for views in VIEWS.values():
            for (_, metric), title in MEASURES.items():
                if metric not in SHOWN:
                    continue
                cells = [cell(known.get((data, views, metric, one))) for one in COMPARISONS]
                lines.append(f"| {data}, {views}: {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


@styled()
def draw() -> None:
    """Gain over the MAE of each kind, in k-NN and in clusters."""
    every = published(list(DATA), HERE)
    shown = [(n, one) for n, one in every if any(kind == STOPPED for kind, _ in one.runs)]
    measures = [("knn", "knn_standardized"), ("clustering", "nmi_mean")]
    figure, axes = panels(len(shown), len(measures), height=2.6)
    grid = np.array(axes, dtype=object).reshape(len(shown), len(measures))
    for row, (name, experiment) in enumerate(shown):
        for column, (evaluation, metric) in enumerate(measures):
            ax = grid[row, column]
            for number, kind in enumerate((LOOKUP, STOPPED, NONE)):
                style = method_style(number) | {"linestyle": "", "capsize": 3}
                mean, error = [], []
                for views in VIEWS.values():
                    sides = Side((MAE, ""), metric), Side((kind, views), metric)
                    gain = experiment.compare(*sides, evaluation) or {}
                    mean.append(gain.get("value", np.nan))
                    error.append(gain.get("std") or np.nan)
                at = np.arange(len(VIEWS)) + 0.18 * (number - 1)
                ax.errorbar(at, mean, error, **style, label=kind)
            ax.axhline(0, color="#777777", linewidth=0.7)
            ax.set_xticks(range(len(VIEWS)), list(VIEWS.values()))
            ax.set(xlim=(-0.5, len(VIEWS) - 0.5))
            ax.set(ylabel="gain over MAE (points)")
            title = MEASURES[evaluation, metric]
            ax.set(title=f"{DATA[name]}: {title}")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    save(figure, OUT / "gains.png")


def page(rows: list[dict[str, Any]]) -> str:
    """The page, from its text and the differences."""
    text = (OUT / "found.md").read_text(encoding="utf-8")
    return filled(text, rows, table=table(rows), tests=number_of_tests(rows))


def main() -> None:
    """Write differences, figure and page."""
    rows = differences()
    text = pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
    write_text(OUT / "differences.csv", text)
    draw()
    write_text(OUT / "README.md", page(rows))


if __name__ == "__main__":
    main()
