"""Tables: results, the paper's numbers, and the training cost of each model.

A result or record that is missing or cannot be read, and an unknown table, raises a `UserError`.
"""

import io
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from maect.core.errors import UserError, entry
from maect.core.files import read_table_text, write_table_text
from maect.core.stamps import is_current, stamp_path
from maect.evaluate import PROTOCOLS, EvaluationConfig
from maect.paper import FOLDER
from maect.records import EvaluationRecord, RunRecord, entries, is_finished, lineage, seed_of
from maect.report.configs import Row
from maect.report.registry import TABLES, Metric, Table
from maect.stages import STAGES, Training, recorded

KEYS = ["architecture", "method"]
COST = ("hours", "overhead")
UNKNOWN = "\N{EN DASH}"
DECIMALS = 4  # far below any difference between seeds, and the same text on every platform

log = logging.getLogger(__name__)


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the metrics of an evaluation's JSON."""
    return EvaluationRecord.read(path).metrics


def labels_behind(path: Path, metric: str) -> float | None:
    """Return the mean number of labels behind a metric of a result; None if it does not say."""
    subsets = EvaluationRecord.read(path).provenance.get("subsets", {})
    sizes = [
        subset["images"] for name, subset in subsets.items() if subset and _is_of(name, metric)
    ]
    return statistics.fmean(sizes) if sizes else None


def _is_of(subset: str, metric: str) -> bool:
    """Return whether a subset, `low_shot_1-2` for example, is one of a metric's."""
    return subset == metric or subset.rpartition("-")[0] == metric


def result_of(evaluations: Path, run: str, names: Sequence[str], key: str) -> Path | None:
    """Return the result of the first of these evaluations that was run and has the metric."""
    files = filter(None, (result_file(evaluations, run, name) for name in names))
    return next((path for path in files if read_metrics(path).get(key) is not None), None)


def result_file(evaluations: Path, run: str, name: str, ending: str = ".json") -> Path | None:
    """Return a file that an evaluation wrote about what is there now; None: no such file.

    A run that was trained again, or images that were sharded again, may have results that are not
    asked for again.
    """
    path = evaluations / run / f"{name}{ending}"
    if not path.exists():
        return None
    result = EvaluationRecord.seek(path.with_suffix(".json"))
    record = RunRecord.find(evaluations.parent / "runs" / run)
    evaluated, encoder = (one and one.encoder_sha256 for one in (result, record))
    if None not in (evaluated, encoder) and evaluated != encoder:
        _leave_out(path, f"an encoder that {run} no longer has")
        return None
    config = path.with_suffix(".yaml")
    if config.exists() and stamp_path(config).exists():
        asked = _evaluation_config(config, config.stat().st_mtime_ns)
        if not is_current(config, asked):
            _leave_out(path, "images or settings that have changed since")
            return None
    return path


@cache
def _evaluation_config(path: Path, changed: int) -> EvaluationConfig:
    """Read a resolved file once, until it has changed."""
    return EvaluationConfig.read(path)


@cache
def _leave_out(path: Path, of: str) -> None:
    """Say once, whatever number of metrics is looked for there."""
    log.warning("%s: of %s; left out", path, of)


def _check_alike(paths: Sequence[Path]) -> None:
    """Refuse to average results of other settings, or of other images (UserError).

    What a result does not say, such as one that was published elsewhere, is no difference.
    """
    known: dict[str, Any] = {}
    for path in paths:
        for name, value in _made_with(EvaluationRecord.read(path)).items():
            if known.setdefault(name, value) != value:
                raise UserError(
                    f"{path}: made with other settings or images than other seeds of "
                    f"{path.parent.name}, so they cannot be averaged; delete the older ones and "
                    "start again"
                )


def _made_with(result: EvaluationRecord) -> dict[str, Any]:
    """Return what all seeds of a row share, as far as a result says it."""
    splits = result.provenance.get("splits", {})
    made = {f"images of {name}": about.get("index_digest") for name, about in splits.items()}
    protocol = PROTOCOLS.get(result.provenance.get("protocol", ""))
    given = dict(result.settings)
    made["resize"] = given.pop("resize", None)
    with suppress(ValidationError):  # of another version
        made["settings"] = protocol and protocol.model_validate(given).identifying()
    return {name: value for name, value in made.items() if value is not None}


def _finite(path: Path, key: str) -> float:
    value = read_metrics(path).get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{path}: metric {key} is {value!r}, not a finite number")
    return float(value)


def _of_models(
    table: Table, rows: Sequence[Row], evaluations: Path
) -> dict[str, dict[tuple[str, str], float]]:
    """Return the numbers that results of any row's run have of many models, by metric."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for metric in (metric for metric in table.metrics if metric.by_model):
        values = found.setdefault(metric.name, {})
        for run in (run for row in rows for run in row.runs):
            path = result_file(evaluations, run, metric.evaluation)
            models = read_metrics(path).get(metric.source) if path else None
            for architecture, methods in (models or {}).items():
                values |= {(architecture, method): value for method, value in methods.items()}
    return found


def measured(
    evaluations: Path,
    runs: Sequence[str],
    names: Sequence[str],
    key: str,
    std: str = "",
    part: int | None = None,
    seed: int | None = None,
) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation over the runs; None where there are no numbers.

    Args:
        names: evaluations that may give the metric: the first that any run has, of all of them.
        std: metric that holds the standard deviation where there is one run.
        part: of the sets of few labels, this one alone.
        seed: of the runs, that of this seed alone; the evaluation is chosen over all of them.
    """
    of_each = ([result_of(evaluations, run, (name,), key) for run in runs] for name in names)
    made = ([path for path in one if path is not None] for one in of_each)
    paths = next((found for found in made if found), [])
    if seed is not None:
        paths = [path for path in paths if seed_of(path.parent.name) == seed]
    _check_alike(paths)
    if part is not None:
        of_parts = [read_metrics(path).get(f"{key}_splits", []) for path in paths]
        values = [float(one[part]) for one in of_parts if part < len(one)]
        return (round(statistics.fmean(values), DECIMALS) if values else None), None
    values = [_finite(path, key) for path in paths]
    mean = round(statistics.fmean(values), DECIMALS) if values else None
    if len(values) > 1:
        return mean, round(statistics.stdev(values), DECIMALS)
    if std and paths and read_metrics(paths[0]).get(std) is not None:
        return mean, round(_finite(paths[0], std), DECIMALS)
    return mean, None


@cache
def paper_table(name: str) -> pd.DataFrame:
    """Read the paper's numbers of a table, indexed by architecture and method. Do not change it."""
    entry(name, TABLES, "table")
    text = FOLDER / f"{name}.csv"
    if not text.is_file():
        return pd.DataFrame(columns=KEYS).set_index(KEYS)
    return pd.read_csv(io.StringIO(text.read_text(encoding="utf-8"))).set_index(KEYS)


def paper_value(name: str, architecture: str, method: str, column: str) -> float | None:
    """Return one number of the paper, or None if it prints none."""
    value = _paper_cell(name, architecture, method, column)
    return None if value is None else float(value)


def _paper_cell(name: str, architecture: str, method: str, column: str) -> Any:
    """Return a number or a text of the paper, or None."""
    table = paper_table(name)
    known = (architecture, method) in table.index and column in table.columns
    value: Any = table.at[(architecture, method), column] if known else None
    return None if pd.isna(value) else value


def _texts(table: Table) -> list[str]:
    """Return the columns of text."""
    return [f"{detail.name}{part}" for detail in table.details for part in ("", "_paper")]


def _others(table: Table, rows: Iterable[Row], evaluations: Path) -> list[Metric]:
    """Return columns for sets beyond the paper's, if the table takes such."""
    columns: dict[str, Metric] = {}
    if not table.others:
        return []
    known = {metric.source for metric in table.metrics}
    for row in rows:
        for run, protocol in itertools.product(row.runs, table.reads(row.method)):
            path = result_file(evaluations, run, protocol)
            metrics = read_metrics(path) if path else {}
            for name, value in metrics.items():
                metric = table.other(name) if isinstance(value, float) else None
                if metric is not None and name not in known:
                    columns.setdefault(name, metric)
    return list(columns.values())


def build_table(
    name: str,
    rows: Iterable[Row],
    evaluations: Path,
    paper: bool = True,
    runs: Path | None = None,
    as_printed: bool = False,
    part: int | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """Build a table of the registry.

    Args:
        paper: whether to put the paper's numbers beside them.
        as_printed: in the rows where the paper prints them; else those of the public MAE, which the
            paper mixes with its own, stand in the row `mae_public`.
        part: of the sets of few labels, this one alone; other metrics are left empty.
        seed: of each row, the run of this seed alone, by the evaluation that all its runs have.

    Returns:
        `architecture`, `method`, then `D` and `D_paper` for every detail D, None where nothing is
        known, and `M`, `M_std`, `M_paper` for every metric M, in the paper's units. NaN where
        nothing was run, where there is one seed, where the paper has no number.
    """
    table = entry(name, TABLES, "table")
    rows = list(rows)
    own = rows if seed is None else [row.of_seed(seed) for row in rows]
    of_models = _of_models(table, own, evaluations)
    source = table.printed or name
    metrics = [*table.metrics, *_others(table, rows, evaluations)]
    given = {(row.architecture, row.method) for row in rows}
    printed = list(paper_table(source).index)
    if paper and table.all_of_paper and not given.isdisjoint(printed):
        rows += [Row(size, method, ()) for size, method in printed if (size, method) not in given]
    lines: list[dict[str, Any]] = []
    seen = set()
    for row in rows:
        if (row.architecture, row.method) in seen:
            raise UserError(f"table {name}: {row.architecture} {row.method} is there twice")
        seen.add((row.architecture, row.method))
        line: dict[str, Any] = {"architecture": row.architecture, "method": row.method}
        for detail in table.details:
            key = row.architecture, row.method, detail.name
            line[detail.name] = trained_with(detail.name, row, runs) if runs else None
            line[f"{detail.name}_paper"] = _paper_cell(source, *key) if paper else None
        for metric in metrics:
            if metric.by_model:
                mean = of_models[metric.name].get((row.architecture, row.method))
                std = None
            else:
                mean, std = _cell(table, metric, row, evaluations, part, seed)
            line[metric.name] = mean
            line[f"{metric.name}_std"] = std
            method = row.method
            column = metric.paper or metric.name
            if not as_printed and column in table.of_public.get(row.architecture, ()):
                method = {"mae": "", "mae_public": "mae"}.get(method, method)
            number = paper_value(source, row.architecture, method, column) if paper else None
            line[f"{metric.name}_paper"] = number
        lines.append(line)
    numbers = [f"{m.name}{part}" for m in metrics for part in ("", "_std", "_paper")]
    frame = pd.DataFrame(lines, columns=KEYS + _texts(table) + numbers)
    return frame.astype(dict.fromkeys(numbers, float))


def _cell(
    table: Table, metric: Metric, row: Row, evaluations: Path, part: int | None, seed: int | None
) -> tuple[float | None, float | None]:
    """Return mean and deviation of the first value of a metric that an evaluation has."""
    names = table.evaluations_of(metric, row.method)
    for key in metric.sources(row.method):
        mean, std = measured(evaluations, row.runs, names, key, metric.std, part=part, seed=seed)
        if mean is not None:
            return mean, std
    return None, None


def printed_tables() -> dict[str, pd.DataFrame]:
    """Build all of the paper's tables with nothing measured."""
    return {
        name: build_table(
            name,
            [Row(str(a), str(m), ()) for a, m in paper_table(name).index],
            Path(),
            as_printed=True,
        )
        for name in TABLES
        if len(paper_table(name))
    }


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV; numbers that were not run are empty cells."""
    write_table_text(path, frame.to_csv(index=False, lineterminator="\n"))


def read_table(path: Path) -> pd.DataFrame:
    """Read a table that `write_table` wrote."""
    texts = _texts(TABLES[path.stem]) if path.stem in TABLES else []
    text = read_table_text(path)
    try:
        # A method may be called 50, None or NA.
        types = dict.fromkeys([*KEYS, *texts], str)
        frame = pd.read_csv(io.StringIO(text), dtype=types, keep_default_na=False, na_values=[""])
        if list(frame.columns[:2]) != KEYS:
            raise ValueError(f"its first columns are not {', '.join(KEYS)}")
        numbers = [column for column in frame.columns[2:] if column not in texts]
        return frame.astype(dict.fromkeys(numbers, float))
    except ValueError as error:
        raise UserError(f"{path}: not a table ({error})") from None


def trained_with(setting: str, row: Row, runs: Path) -> str | None:
    """Return a setting of the stages that trained a row's first encoder, such as `800; 20`.

    Once if it is the same in all; an en dash for imported weights, if they were trained on; None
    if nothing is known.
    """
    if not row.runs or not is_finished(runs / row.runs[0]):
        return None
    values = [
        str(record.settings.get(setting, UNKNOWN))
        for record in reversed(chain(row.runs[0], runs))
        if STAGES[record.stage].trains_encoder
    ]
    values = [value.removesuffix(".0") for value in values]
    if set(values) == {UNKNOWN}:
        return None
    return values[0] if len(set(values)) == 1 else "; ".join(values)


def chain(run: str, runs: Path) -> list[RunRecord]:
    """Return the records of a run and of all it started from, the run itself first."""
    return list(lineage(run, lambda name: RunRecord.of(runs / name)))


def flops_of_step(record: RunRecord) -> float:
    """Count the operations of one update of a finished run, from its settings."""
    stage = recorded(record)
    encoder = record.encoder
    if encoder is None or not isinstance(stage, Training):
        raise UserError(f"run {record.run}: trained nothing; run it again")
    return stage.flops_per_image(encoder) * stage.batch_size


def hours_of(records: list[RunRecord]) -> tuple[float, float]:
    """Return a chain's device hours of training, and those after pre-training in percent of it.

    NaN where a part was not trained here: what public weights cost is not known.
    """
    first = STAGES.get(records[-1].stage)
    if first is None or not first.trains:
        return math.nan, math.nan
    hours = [record.device_hours or 0.0 for record in records]
    if hours[-1] <= 0:
        return math.nan, math.nan
    return sum(hours), 100 * sum(hours[:-1]) / hours[-1]


def cost_table(rows: Iterable[Row], runs: Path) -> pd.DataFrame:
    """Build a table of the device hours of each model.

    Returns:
        `architecture`, `method`, then `hours` (all training behind the model) and `overhead`
        (percent of the pre-training), each with `_std` over seeds and `_paper` (empty: not
        printed), as in the other tables. Rows whose runs are not finished have empty cells; rows
        whose cost no run will ever tell, since it is that of imported weights, are left out.
    """
    return _by_row(rows, runs, COST, lambda run: hours_of(chain(run, runs)))


def trained_table(rows: Iterable[Row], runs: Path) -> pd.DataFrame:
    """Build a table of each model's own training, also if it began with imported weights.

    Returns:
        As `cost_table`, with `hours` and `pretraining_epochs`, of the training that the model
        begins with, NaN where that was imported. Rows of weights as they were imported are left
        out.
    """

    def cost(run: str) -> tuple[float, float]:
        records = chain(run, runs)
        stage = STAGES.get(records[0].stage)
        hours = records[0].device_hours or 0.0 if stage and stage.trains else math.nan
        return hours, float(records[-1].epochs or math.nan)

    return _by_row(rows, runs, ("hours", "pretraining_epochs"), cost)


def pretraining_table(rows: Iterable[Row], runs: Path) -> pd.DataFrame:
    """Build a table of the NNCLR loss at the start of each model's pre-training.

    Returns:
        As `cost_table`, with `nnclr_loss`: the mean over the first tenth of the epochs. Rows of
        pre-trainings without an NNCLR head are left out.
    """

    def start(run: str) -> tuple[float]:
        first = chain(run, runs)[-1]
        logged = entries(runs / first.run / "metrics.jsonl", sha256=first.log_sha256)
        until = (first.epochs or 0) / 10
        losses = [e["loss_nnclr"] for e in logged if "loss_nnclr" in e and e["epoch"] <= until]
        return (statistics.fmean(losses) if losses else math.nan,)

    return _by_row(rows, runs, ("nnclr_loss",), start)


def _by_row(
    rows: Iterable[Row],
    runs: Path,
    columns: Sequence[str],
    values_of: Callable[[str], Sequence[float]],
) -> pd.DataFrame:
    """Return the records of each row's finished runs; without rows that never have any.

    `values_of` gives the columns' values for a run, NaN where there is none.
    """
    lines = []
    for row in rows:
        done = [run for run in row.runs if is_finished(runs / run)]
        values = [values_of(run) for run in done]
        if done and len(done) == len(row.runs) and all(math.isnan(value[0]) for value in values):
            continue
        line: dict[str, Any] = {"architecture": row.architecture, "method": row.method}
        for position, column in enumerate(columns):
            numbers = [value[position] for value in values if not math.isnan(value[position])]
            line[column] = statistics.fmean(numbers) if numbers else math.nan
            line[f"{column}_std"] = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
            line[f"{column}_paper"] = math.nan
        lines.append(line)
    numbers_of = [f"{column}{part}" for column in columns for part in ("", "_std", "_paper")]
    return pd.DataFrame(lines, columns=KEYS + numbers_of)
