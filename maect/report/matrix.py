"""Matrices of encoders and data: a table for each measure, for `matrix.md` and pages."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from maect.evaluate.sampling import LEVEL, RESAMPLES

INTERVALS = (
    f"Intervals are {LEVEL:g} % by the bootstrap over test images ({RESAMPLES:,} resamples); they "
    "say nothing of other training images."
)


def matrices(
    frame: pd.DataFrame,
    titles: Mapping[str, str],
    columns: str,
    cell: Callable[[Any], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return a table for each measure, rows encoders, of strings to show.

    Args:
        frame: a line for each number, with `encoder`, `measure` and the columns' name.
        titles: of the measures, in order; one without a line has no table.
        columns: `folder` or `dataset`, a column for each.
        cell: what a line of the frame shows: `value`, `more`, and whether it is the `best`.
    """
    shown = []
    for measure, title in titles.items():
        part = frame[frame["measure"] == measure]
        if part.empty:
            continue
        names = list(dict.fromkeys(part[columns]))
        cells = {(line.encoder, getattr(line, columns)): cell(line) for line in part.itertuples()}
        empty = {"value": "", "more": "", "best": False}
        rows = [
            {"encoder": name, "cells": [cells.get((name, of), empty) for of in names]}
            for name in dict.fromkeys(part["encoder"])
        ]
        shown.append({"title": title, "columns": names, "rows": rows})
    return shown
