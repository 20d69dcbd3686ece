"""Checks the paper's statements (`statements.py`) against measured tables."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from uncertainties import nominal_value, std_dev, ufloat

from maect.core.files import write_text
from maect.report.configs import ClaimsConfig, Row
from maect.report.render import claims_page
from maect.report.statements import EACH_SHIFT, SHIFTED, STATEMENTS, Statement
from maect.report.tables import (
    DECIMALS,
    cost_table,
    pretraining_table,
    printed_tables,
    read_table,
    trained_table,
)

HOLDS, FAILS, NOISE, OPEN = "holds", "fails", "within noise", "not measured"
Key = tuple[str, str, str, str]
"""Table, architecture, method, metric."""
Tables = Mapping[str, pd.DataFrame]

VALUE = re.compile(r"""([a-z]\w*)\.(\w+|\*)(?:\.(\w+)|\["([\w.]+)"\])\.(\w+)""")
COST, PRETRAINING, TRAINED = "cost", "pretraining", "trained"
"""Tables beside those that are shown: what training cost, what its first stage logged, and which
models were trained here."""
# What the paper prints as equal is equal.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Comparison:
    """One comparison with its numbers; `difference` is positive if it holds."""

    text: str
    holds: bool | None
    """None: a value was not measured."""
    left: float
    right: float
    difference: float
    std: float
    """Standard deviation of the difference over seeds; NaN where nothing says what it is."""
    at_least: bool
    """Whether that is of a part of the values only: no one knows it of the others."""
    missing: tuple[Key, ...]
    decimals: int = 2
    """To print the difference with."""

    @property
    def significant(self) -> bool | None:
        """Whether the difference exceeds its standard deviation; None where that is not known."""
        if self.holds is None or math.isnan(self.std):
            return None
        exceeds = abs(self.difference) > self.std
        return None if exceeds and self.at_least else exceeds


@dataclass(frozen=True)
class Verdict:
    """A statement with the comparisons that decide it."""

    statement: Statement
    comparisons: tuple[Comparison, ...]

    @property
    def result(self) -> str:
        """`holds` if all comparisons do, `fails` if one does not, else `not measured`.

        `within noise` where that rests on a difference that does not exceed its standard
        deviation: one that had to hold, or all those that do not.
        """
        failing = [one for one in self.comparisons if one.holds is False]
        if failing:
            return NOISE if all(one.significant is False for one in failing) else FAILS
        if any(one.holds is None for one in self.comparisons):
            return OPEN
        return NOISE if any(one.significant is False for one in self.comparisons) else HOLDS

    @property
    def significant(self) -> str:
        """`yes` or `no`: whether the standard deviation is exceeded; empty where it is unknown."""
        if self.result in (OPEN, NOISE):
            return "no" if self.result == NOISE else ""
        if self.result == FAILS:  # one is enough for that
            return "yes" if any(c.significant for c in self.comparisons if not c.holds) else ""
        return "yes" if all(c.significant for c in self.comparisons) else ""

    @property
    def numbers(self) -> str:
        """The comparisons in numbers, and what of which models in which tables is missing."""
        parts = []
        missing: dict[str, dict[str, dict[str, None]]] = {}
        for one in self.comparisons:
            for table, architecture, method, metric in one.missing:
                of_table = missing.setdefault(table, {})
                of_table.setdefault(f"{architecture} {method}", {})[metric] = None
            if one.holds is None:
                continue
            spread = "" if math.isnan(one.std) else f" ± {one.std:.{one.decimals}f}"
            spread += " or more" if one.at_least else ""
            mark = "" if one.holds else " (fails)"
            difference = f"{one.left - one.right:+.{one.decimals}f}"
            parts.append(f"{one.text}: {difference}{spread}{mark}")
        for table, models in missing.items():
            named = (f"{model} ({', '.join(metrics)})" for model, metrics in models.items())
            parts.append(f"needs {table}: {', '.join(named)}")
        return "; ".join(parts)


def _key(match: re.Match[str]) -> Key:
    table, architecture, method, quoted, metric = match.groups()
    return table, architecture, method or quoted, metric


def _look_up(tables: Tables, key: Key, suffix: str) -> float:
    name, architecture, method, metric = key
    if name not in tables or f"{metric}{suffix}" not in tables[name]:
        return math.nan
    frame = tables[name]
    line = frame[(frame["architecture"] == architecture) & (frame["method"] == method)]
    return float(line[f"{metric}{suffix}"].iloc[0]) if len(line) else math.nan


def _deviation(tables: Tables, key: Key) -> float | None:
    """Standard deviation of a value over seeds, or what stands in for that of one seed.

    NaN where it is not known, None for what was not trained here.
    """
    own = _look_up(tables, key, "_std")
    _, architecture, method, metric = key
    if not math.isnan(own):
        return own
    if method not in _methods(tables.get(TRAINED), architecture):
        return None
    column = f"{metric}_std"
    known = [
        f.loc[f["architecture"] == architecture, column] for f in tables.values() if column in f
    ]
    # What is the same for all seeds says nothing of others.
    return float(pd.concat(known).replace(0.0, math.nan).max()) if known else math.nan


def _methods(frame: pd.DataFrame | None, architecture: str) -> Collection[str]:
    """Methods for which a table has a row of an architecture."""
    return () if frame is None else set(frame.loc[frame["architecture"] == architecture, "method"])


def compare(text: str, tables: Tables, suffix: str = "") -> Comparison:
    """Decide one comparison, without `*`.

    The standard deviation is that of a function of independent values, to first order. A model
    that was trained with one seed has the largest that any of its architecture has in this metric;
    an imported one counts as exact.

    Args:
        text: the comparison.
        tables: by name, as `build_table` makes them.
        suffix: `_paper` decides it with the paper's own numbers.

    Raises:
        ValueError: not one of > >= < <= between two sides.
    """
    sides = re.split(r" ([<>]=?) ", text)
    if len(sides) != 3:
        raise ValueError(f"not one comparison: {text}")
    values = {key: _look_up(tables, key, suffix) for key in map(_key, VALUE.finditer(text))}
    missing = tuple(key for key, value in values.items() if math.isnan(value))
    spreads = {key: math.nan if suffix else _deviation(tables, key) for key in values}
    varying = {key: spread for key, spread in spreads.items() if spread is not None}
    known = {key: spread for key, spread in varying.items() if not math.isnan(spread)}
    numbers = values | {key: ufloat(values[key], std) for key, std in known.items() if std}

    def number(side: str) -> Any:
        # Statements are our own text, so Python may read them.
        code = VALUE.sub(lambda match: f"numbers[{_key(match)!r}]", side)
        return eval(code, {"__builtins__": {}}, {"numbers": numbers})

    left, sign, right = number(sides[0]), sides[1], number(sides[2])
    label = f"{_short(sides[0])} {sign.replace('>=', '≥').replace('<=', '≤')} {_short(sides[2])}"
    ends = nominal_value(left), nominal_value(right)
    if missing:
        return Comparison(label, None, *ends, math.nan, math.nan, False, missing)
    difference = left - right if sign.startswith(">") else right - left
    margin = nominal_value(difference)
    holds = margin >= -TOLERANCE if sign.endswith("=") else margin > TOLERANCE
    std = std_dev(difference) if known else math.nan
    decimals = _decimals(margin, values.values())
    return Comparison(label, holds, *ends, margin, std, 0 < len(known) < len(varying), (), decimals)


def _decimals(difference: float, values: Iterable[float]) -> int:
    """Two for percents, all there are for parts of 1, and as many as show a difference."""
    if all(abs(value) <= 1 for value in values):
        return DECIMALS
    if abs(difference) <= TOLERANCE:
        return 2
    return next((n for n in range(2, DECIMALS) if round(difference, n)), DECIMALS)


def _short(side: str) -> str:
    """One side of a comparison without the tables' names."""
    return VALUE.sub(lambda match: match[0].removeprefix(f"{match[1]}."), side).replace('"', "'")


def expand(text: str, tables: Tables) -> list[str]:
    """One comparison for every architecture that `*` stands for; itself where there is no `*`.

    That is every one with a row of each model named with `*`: others cannot be compared. Likewise
    for every set that `each_shift` stands for.
    """
    if EACH_SHIFT in text:
        return [one for s in _shifts(tables) for one in expand(text.replace(EACH_SHIFT, s), tables)]
    starred = [key for key in map(_key, VALUE.finditer(text)) if key[1] == "*"]
    if not starred:
        return [text]
    have = [_architectures(tables, table, method) for table, _, method, _ in starred]
    common = [one for one in have[0] if all(one in others for others in have)]
    return [text.replace(".*.", f".{architecture}.") for architecture in common or ["any"]]


def _shifts(tables: Tables) -> tuple[str, ...]:
    """The paper's shifted test sets, or those measured in their place where none of them was."""
    frame = tables.get("robustness", pd.DataFrame())
    measured = [c for c in frame if f"{c}_std" in frame and frame[c].notna().any()]
    others = tuple(str(name) for name in measured if not str(name).startswith("imagenet_"))
    return others if others and not set(SHIFTED) & set(measured) else SHIFTED


def _architectures(tables: Tables, table: str, method: str) -> list[str]:
    """Architectures for which a table has a row of a method, in its order."""
    if table not in tables:
        return []
    frame = tables[table]
    return list(dict.fromkeys(frame.loc[frame["method"] == method, "architecture"]))


def judge(
    tables: Tables, statements: Iterable[Statement] = STATEMENTS, suffix: str = ""
) -> list[Verdict]:
    """The verdict on every statement, in the paper's order."""
    return [
        Verdict(
            statement,
            tuple(
                compare(one, tables, suffix)
                for text in statement.comparisons
                for one in expand(text, tables)
            ),
        )
        for statement in statements
    ]


def on_plain_knn(statement: Statement) -> Statement:
    """The statement about k-NN on features as they are."""
    texts = (text.replace(".knn_standardized", ".knn") for text in statement.comparisons)
    return replace(statement, comparisons=tuple(texts))


def claims_table(tables: Tables) -> pd.DataFrame:
    """All statements with their verdicts.

    Returns:
        `claim`, `statement`, `paper` (where it is made), `verdict` (holds, fails, within noise,
        not measured), `significant` (yes, no, or empty where no deviation is known), `numbers`,
        `paper_verdict` (by the paper's own printed numbers), `plain_knn` (on features that are not
        standardised, where k-NN decides), `expression`.
    """
    statements = [*STATEMENTS]
    printed = judge(printed_tables(), statements, "_paper")
    others = [one for one in map(on_plain_knn, statements) if one not in statements]
    plain = {one.statement.name: one.result for one in judge(tables, others)}
    lines = [
        {
            "claim": verdict.statement.name,
            "statement": verdict.statement.text,
            "paper": verdict.statement.paper,
            "verdict": verdict.result,
            "significant": verdict.significant,
            "numbers": verdict.numbers,
            "paper_verdict": "" if paper.result == OPEN else paper.result,
            "plain_knn": plain.get(verdict.statement.name, ""),
            "expression": "; ".join(verdict.statement.comparisons),
        }
        for verdict, paper in zip(judge(tables, statements), printed, strict=True)
    ]
    return pd.DataFrame(lines)


def tables_of_runs(rows: Sequence[Row], runs: Path) -> dict[str, pd.DataFrame]:
    """The tables that are not shown: of what the runs behind these rows say of themselves."""
    return {
        COST: cost_table(rows, runs),
        TRAINED: trained_table(rows, runs),
        PRETRAINING: pretraining_table(rows, runs),
    }


def write_claims(frame: pd.DataFrame, path: Path) -> None:
    """Write the verdicts as CSV."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def make_claims(path: Path) -> None:
    """`maect claims claims.yaml`: beside it the verdicts as CSV and as a page."""
    config = ClaimsConfig.read(path)
    tables = {file.stem: read_table(file) for file in config.tables}
    verdicts = claims_table(tables | tables_of_runs(config.rows, config.runs))
    write_claims(verdicts, path.with_suffix(".csv"))
    write_text(path.with_suffix(".html"), claims_page(verdicts))
