"""The headline of a report: the largest difference from the MAE, and its table."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maect.core.yaml_files import read_yaml
from maect.report.bounds import (
    LEVEL,
    TOLERANCE,
    Comparison,
    Key,
    Tables,
    bound,
    compare,
    error_of_images,
    look_up,
    value,
)
from maect.report.claims import evidence
from maect.report.configs import ReportConfig, ShownConfig
from maect.report.registry import PUBLISHED, TABLES, architecture_title, method_title
from maect.report.tables import KEYS

MEASURES: dict[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"))
BEFORE = ("mae", "mae_public")
"""Encoder before tuning, with which the other models are compared."""
NOT_FOUND = frozenset({*BEFORE, "oracle", *PUBLISHED})
"""Methods whose numbers are no finding: the MAE, labels as input, other groups' checkpoints."""
CHOSEN_ON_TEST = frozenset({"linear_probe"})
"""Measures whose settings are chosen on the test images, as in the paper."""
Model = tuple[str, str]
"""Architecture and method."""


@dataclass(frozen=True)
class GainOverMae:
    """A difference between a model and the MAE of its size."""

    measure: str
    model: Model
    before: Model
    comparison: Comparison

    @property
    def errors(self) -> float:
        """Return how many of its standard deviations the difference is; 0 if they are unknown."""
        size = abs(self.comparison.difference)
        std = self.comparison.std
        return 0.0 if math.isnan(std) or size <= TOLERANCE else size / std


@dataclass(frozen=True)
class MainResult:
    """The sentence of the first page, and the table of measures that it rests on.

    Attributes:
        text: the sentence; "" if its tables have nothing to state.
        columns: titles of the measures.
        lines: title of each model, and its cells: text, and whether it is bold.
        legend: how to read the table.
    """

    text: str = ""
    columns: tuple[str, ...] = ()
    lines: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = ()
    legend: str = ""


def main_result_of(config: ReportConfig) -> MainResult:
    """Return the finding of a report: a sentence, and a table with the sentence's measure first.

    The sentence is about a model that the first figure shows, if the tables have any of them.
    """
    shown = [ShownConfig.read(file.with_suffix(".yaml")) for file in config.stated]
    if not shown:
        return MainResult()
    rows = list(dict.fromkeys(row for one in shown for row in one.rows))
    indices = {"val": config.tested} if config.tested is not None else {}
    tables, more = evidence(config.stated, rows, shown[0].runs, indices)
    figures = [ShownConfig.read(file.with_suffix(".yaml")) for file in config.figures[:1]]
    drawn = {(row.architecture, row.method) for one in figures for row in one.rows}
    asked = {one.name: tables[one.name] for one in shown}
    images = more["images"].get("val")
    found = list(_findings(asked, tables, more))
    found = [one for one in found if one.model in drawn] or found
    if not found:
        text = _value(asked, drawn, more["images"])
        return table_of_measures(text, [*MEASURES], asked, tables, more)
    largest = max(found, key=lambda one: (one.errors, abs(one.comparison.difference)))
    measures = list(dict.fromkeys([largest.measure, *MEASURES]))
    return table_of_measures(_sentence(largest, asked, images), measures, asked, tables, more)


def table_of_measures(
    text: str, measures: Sequence[str], asked: Tables, tables: Tables, more: Mapping[str, Any]
) -> MainResult:
    """Return a finding with its table: every model by every measure, with errors.

    The best of a column is bold, with those that are not distinguishable from it.

    Args:
        text: the headline.
        measures: columns, where any model has a number.
        asked: tables to show, by name.
        tables: these, and those of the runs behind them (`claims.evidence`).
        more: keyword arguments of `claims.compare`.
    """
    of_each = (frame[KEYS].itertuples(index=False, name=None) for frame in asked.values())
    models = list(dict.fromkeys(itertools.chain.from_iterable(of_each)))
    columns, cells = [], {model: list[tuple[str, bool]]() for model in models}
    for measure in measures:
        name = next((name for name, frame in asked.items() if measure in frame), None)
        if name is None:
            continue
        known = {model: look_up(asked, Key(name, model[0], model[1], measure)) for model in models}
        numbers = {model: number for model, number in known.items() if not math.isnan(number)}
        if not numbers:
            continue
        title = next(one.title for one in TABLES[name].metrics if one.name == measure)
        columns.append(title + (" †" if measure in CHOSEN_ON_TEST else ""))
        equal = _not_below_best(name, measure, numbers, tables, more)
        for model in models:
            if model not in numbers:
                cells[model].append(("", False))
                continue
            key = Key(name, model[0], model[1], measure)
            error = look_up(asked, key, "_std")
            if math.isnan(error):
                error = error_of_images(key, numbers[model], more["images"])
            spread = "" if math.isnan(error) else f" ± {error:.1f}"
            cells[model].append((f"{numbers[model]:.1f}{spread}", model in equal))
    if not columns:
        return MainResult(text)
    lines = tuple((_title(model, asked), tuple(cells[model])) for model in models)
    return MainResult(text, tuple(columns), lines, _legend(columns, more))


def _legend(columns: Sequence[str], more: Mapping[str, Any]) -> str:
    """Return how to read the table."""
    images = more["images"].get("val")
    of_images = f"standard error of {images:,} test images" if images else ""
    errors = f" ± {of_images}" if images else ""
    if len(more["seeds"]) > 1:
        errors = " ± standard deviation over seeds"
        errors += f" (with one seed, {of_images})" if images else ""
    legend = f"Accuracy in %{errors}. Bold: the best of a column, and all that are not "
    legend += f"distinguishable from it (p > {LEVEL})."
    if any(column.endswith("†") for column in columns):
        legend += " †: learning rate and epoch chosen on the test images."
    return legend


def _not_below_best(
    name: str, measure: str, numbers: Mapping[Model, float], tables: Tables, more: Mapping[str, Any]
) -> set[Model]:
    """Return the best model of a column, and those that are not distinguishable from it."""
    best = max(numbers, key=lambda model: numbers[model])
    equal = {best}
    for model in numbers:
        better = bound(
            value(name, best[0], best[1], measure), ">", value(name, model[0], model[1], measure)
        )
        if model != best and not compare(better, tables, **more).chance <= LEVEL:  # NaN: unknown
            equal.add(model)
    return equal


def _findings(asked: Tables, tables: Tables, more: Mapping[str, Any]) -> Iterator[GainOverMae]:
    for name, frame in asked.items():
        models = list(frame[KEYS].itertuples(index=False, name=None))
        for measure in (one for one in MEASURES if one in frame):
            for model in models:
                maes = [(model[0], one) for one in BEFORE if (model[0], one) in models]
                if model[1] in NOT_FOUND or not maes:
                    continue
                before = maes[0]
                later, earlier = (value(name, one[0], one[1], measure) for one in (model, before))
                comparison = compare(bound(later, ">", earlier), tables, **more)
                if comparison.holds is None:
                    continue
                yield GainOverMae(measure, model, before, comparison)


def _sentence(one: GainOverMae, asked: Tables, images: int | None) -> str:
    found = one.comparison
    change = found.left - found.right
    error = "" if math.isnan(found.std) else f" ± {found.std:.1f}"
    verb = "rises" if change > 0 else "falls" if change < 0 else "stays"
    measure = MEASURES[one.measure]
    begin = measure if measure.startswith("k-NN") else measure[0].upper() + measure[1:]
    text = (
        f"{begin} {verb} from {found.right:.1f} % "
        f"({_title(one.before, asked)}) to {found.left:.1f} % ({_title(one.model, asked)}): "
        f"{change:+.1f}{error} points ({_basis(found.seeds, images)})"
    )
    return text + ("." if one.comparison.significant is not False else "; this may be chance.")


def _basis(seeds: int, images: int | None) -> str:
    """Return the seeds and images that a number and its error rest on."""
    parts = [f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"]
    if images:
        parts.append(f"{images:,} test images")
    return ", ".join(parts)


def _value(asked: Tables, drawn: Collection[Model], images: Mapping[str, int]) -> str:
    """Return a sentence on the last model that has a number, without a comparison."""
    for measure, title in MEASURES.items():
        for name, frame in asked.items():
            models = frame[KEYS].itertuples(index=False, name=None)
            numbers = {
                model: look_up(asked, Key(name, model[0], model[1], measure)) for model in models
            }
            known = [model for model, number in numbers.items() if not math.isnan(number)]
            known = [one for one in known if one in drawn] or known
            if known:
                model = known[-1]
                number = numbers[model]
                std = error_of_images(Key(name, model[0], model[1], measure), number, images)
                error = "" if math.isnan(std) else f" ± {std:.1f}"
                return f"{_title(model, asked)}: {title} {number:.1f}{error} %."
    return ""


def _title(model: Model, asked: Tables) -> str:
    """Return a model's name, with its architecture if the tables have several."""
    sizes = {size for frame in asked.values() for size in frame[KEYS[0]]}
    name = method_title(model[1])
    return name if len(sizes) == 1 else f"{name}, {architecture_title(model[0])}"
