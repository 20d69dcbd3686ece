"""Page of several data sets: every encoder on each, by every evaluation."""

import itertools
import math
from pathlib import Path
from typing import Any

import pandas as pd

from maect.core.files import write_text
from maect.report.configs import DatasetsConfig
from maect.report.render import INTERVALS, MINUS, matrices, render_page
from maect.report.tables import read_metrics, result_file, write_table

COLUMNS = ("encoder", "dataset", "evaluation", "metric", "value", "low", "high")
NOTES = (
    "Rows are runs, and each seed is a run. A column is missing where nothing was evaluated.",
    INTERVALS,
    "A number without the words 'held-out' may be the best of several settings on the test images.",
)


def build_datasets(config: DatasetsConfig) -> pd.DataFrame:
    """Return a line for each number that a run has on a data set, with the columns `COLUMNS`.

    `low` and `high` are the ends of its 95 % interval, empty where the evaluation has none.
    """
    lines = []
    for (evaluation, metrics), run, (dataset, behind) in itertools.product(
        config.measures.items(), config.runs, config.datasets.items()
    ):
        path = result_file(config.evaluations, run, evaluation + behind)
        found = read_metrics(path) if path else {}
        for metric in metrics:
            value = found.get(metric)
            if not isinstance(value, int | float):
                continue
            ends = found.get(f"{metric}_low"), found.get(f"{metric}_high")
            lines.append((run, dataset, evaluation, metric, value, *ends))
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("value", "low", "high"), float))


def make_datasets(path: Path) -> None:
    """`maect page datasets.yaml`: beside it `datasets` as CSV and Markdown."""
    config = DatasetsConfig.read(path)
    frame = build_datasets(config)
    write_table(frame, path.with_suffix(".csv"))
    text = render_page("matrix.md", notes=NOTES, tables=matrices_of(config, frame))
    write_text(path.with_suffix(".md"), text)


def matrices_of(config: DatasetsConfig, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table for each data set: rows encoders, columns measures."""
    titles = {
        f"{evaluation} {metric}": f"{title} ({evaluation})"
        for evaluation, metrics in config.measures.items()
        for metric, title in metrics.items()
    }
    named = frame.assign(measure=frame["evaluation"] + " " + frame["metric"])
    return matrices(named, titles, "dataset", _cell)


def _cell(line: Any) -> dict[str, Any]:
    """Return a cell: the value, with one decimal if it is in percent, and its interval."""
    digits = 3 if line.metric.startswith("ei_") else 1
    value, low, high = (
        f"{number:.{digits}f}".replace("-", MINUS) for number in (line.value, line.low, line.high)
    )
    more = "" if math.isnan(line.low) else f"{low} to {high}"
    return {"value": value, "more": more, "best": False}
