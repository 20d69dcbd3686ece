"""What the training behind each model cost, from the runs' completion records."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from maect.core.errors import UserError
from maect.core.files import read_json
from maect.report.tables import KEYS, Row

COLUMNS = ("hours", "overhead")


def chain(run: str, runs: Path) -> list[dict[str, Any]]:
    """Records of a run and of all it started from, the run itself first.

    Raises:
        UserError: a record that is missing or not one.
    """
    records: list[dict[str, Any]] = []
    name: str | None = run
    while name is not None:
        path = runs / name / "run.json"
        record = read_json(path)
        if not isinstance(record, dict) or "stage" not in record:
            raise UserError(f"{path}: not a completion record; run {name} again")
        if any(seen["run"] == record["run"] for seen in records):
            raise UserError(f"{path}: run {name} starts from itself")
        records.append(record)
        name = record.get("source")
    return records


def hours_of(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Device hours of all training in a chain, and what comes after pre-training in percent of it.

    NaN where a part was not trained here: what public weights cost is not known.
    """
    first = records[-1]
    if first["stage"] != "pretrain":
        return math.nan, math.nan
    hours = [float(record["device_hours"]) for record in records]
    if hours[-1] <= 0:
        return math.nan, math.nan
    return sum(hours), 100 * sum(hours[:-1]) / hours[-1]


def cost_table(rows: Iterable[Row], runs: Path) -> pd.DataFrame:
    """Device hours behind each model.

    Returns:
        `architecture`, `method`, then `hours` (all training behind the model) and `overhead`
        (percent of the pre-training), each with `_std` over seeds and `_paper` (empty: not
        printed), as in the other tables. Rows whose runs are not finished have empty cells; rows
        whose cost no run will ever tell, since it is that of imported weights, are left out.

    Raises:
        UserError: a record that cannot be read.
    """
    lines = []
    for row in rows:
        done = [run for run in row.runs if (runs / run / "run.json").exists()]
        values = [hours_of(chain(run, runs)) for run in done]
        if done and done == row.runs and all(math.isnan(hours) for hours, _ in values):
            continue
        line: dict[str, Any] = {"architecture": row.architecture, "method": row.method}
        for position, column in enumerate(COLUMNS):
            numbers = [value[position] for value in values if not math.isnan(value[position])]
            line[column] = statistics.fmean(numbers) if numbers else math.nan
            line[f"{column}_std"] = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
            line[f"{column}_paper"] = math.nan
        lines.append(line)
    numbers_of = [f"{column}{part}" for column in COLUMNS for part in ("", "_std", "_paper")]
    return pd.DataFrame(lines, columns=KEYS + numbers_of)
