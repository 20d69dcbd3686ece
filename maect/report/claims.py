"""Checks the paper's statements (`statements.py`) against measured tables."""

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from uncertainties import std_dev, ufloat

from maect.core.files import write_text
from maect.core.seeds import seed_of
from maect.report.configs import ClaimsConfig, Row, ShownConfig
from maect.report.render import claims_page
from maect.report.statements import EACH_SHIFT, SHIFTED, STATEMENTS, Statement
from maect.report.tables import (
    DECIMALS,
    build_table,
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
Seeds = Mapping[int, Tables]
"""The same tables of each seed alone."""

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
    limit: bool = False
    """Whether the right side is a number, so that the left one is printed."""

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
            number = f"{one.left:.{one.decimals}f}"
            if not one.limit:
                number = f"{one.left - one.right:+.{one.decimals}f}"
            parts.append(f"{one.text}: {number}{spread}{mark}")
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
    _, architecture, _, metric = key
    if not math.isnan(own):
        return own
    if not _is_trained(tables, key):
        return None
    column = f"{metric}_std"
    known = [
        f.loc[f["architecture"] == architecture, column] for f in tables.values() if column in f
    ]
    # What is the same for all seeds says nothing of others.
    return float(pd.concat(known).replace(0.0, math.nan).max()) if known else math.nan


def _is_trained(tables: Tables, key: Key) -> bool:
    """Whether a model was trained here: what is imported has one seed."""
    _, architecture, method, _ = key
    return method in _methods(tables.get(TRAINED), architecture)


def _methods(frame: pd.DataFrame | None, architecture: str) -> Collection[str]:
    """Methods for which a table has a row of an architecture."""
    return () if frame is None else set(frame.loc[frame["architecture"] == architecture, "method"])


def compare(
    text: str, tables: Tables, suffix: str = "", seeds: Seeds = MappingProxyType({})
) -> Comparison:
    """Decide one comparison, without `*`.

    A tuned encoder of a seed begins with the MAE of this seed. So the difference is computed seed
    by seed where all models that were trained here have seeds in common, and its mean and standard
    deviation are over these. With fewer than two of them the deviation is that of a function of
    independent values, to first order: a model of one seed has the largest that any of its
    architecture has in this metric. An imported one counts as exact where none comes with it.

    Args:
        text: the comparison.
        tables: by name, as `build_table` makes them.
        suffix: `_paper` decides it with the paper's own numbers.
        seeds: the tables of each seed alone.

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

    def both(numbers: Mapping[Key, Any]) -> tuple[Any, Any]:
        # Statements are our own text, so Python may read them.
        codes = (VALUE.sub(lambda m: f"numbers[{_key(m)!r}]", side) for side in sides[::2])
        left, right = (eval(c, {"__builtins__": {}}, {"numbers": numbers}) for c in codes)
        return left, right

    sign = sides[1]
    label = f"{_short(sides[0])} {sign.replace('>=', '≥').replace('<=', '≤')} {_short(sides[2])}"
    if missing:
        return Comparison(label, None, *both(values), math.nan, math.nan, False, missing)
    imported = [key for key in varying if TRAINED in tables and not _is_trained(tables, key)]
    of_seeds = [both(values | own) for own in _in_common(varying.keys() - imported, seeds)]
    if of_seeds:
        left, right = (statistics.fmean(side) for side in zip(*of_seeds, strict=True))
    else:
        left, right = both(values)
    margin = left - right if sign.startswith(">") else right - left
    holds = margin >= -TOLERANCE if sign.endswith("=") else margin > TOLERANCE
    std, at_least = math.nan, False
    if len(of_seeds) > 1:
        std = statistics.stdev(one - other for one, other in of_seeds)
    elif known:
        one, other = both(values | {k: ufloat(values[k], std) for k, std in known.items() if std})
        std, at_least = std_dev(one - other), len(known) < len(varying)
    decimals = _decimals(margin, values.values())
    limit = not VALUE.search(sides[2])
    return Comparison(label, holds, left, right, margin, std, at_least, (), decimals, limit)


def _in_common(varying: Collection[Key], seeds: Seeds) -> list[dict[Key, float]]:
    """These values of each seed that has all of them."""
    of_each = ({key: _look_up(tables, key, "") for key in varying} for tables in seeds.values())
    return [own for own in of_each if own and not any(map(math.isnan, own.values()))]


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
    tables: Tables,
    statements: Iterable[Statement] = STATEMENTS,
    suffix: str = "",
    seeds: Seeds = MappingProxyType({}),
) -> list[Verdict]:
    """The verdict on every statement, in the paper's order."""
    return [
        Verdict(
            statement,
            tuple(
                compare(one, tables, suffix, seeds)
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


def claims_table(tables: Tables, seeds: Seeds = MappingProxyType({})) -> pd.DataFrame:
    """All statements with their verdicts.

    Args:
        tables: by name, as `build_table` makes them, and those of `tables_of_runs`.
        seeds: the same of each seed alone.

    Returns:
        `claim`, `statement`, `paper` (where it is made), `verdict` (holds, fails, within noise,
        not measured), `significant` (yes, no, or empty where no deviation is known), `numbers`,
        `paper_verdict` (by the paper's own printed numbers), `plain_knn` (on features that are not
        standardised, where k-NN decides), `expression`.
    """
    statements = [*STATEMENTS]
    decided = judge(tables, statements, seeds=seeds)
    printed = judge(printed_tables(), statements, "_paper")
    others = [one for one in map(on_plain_knn, statements) if one not in statements]
    plain = {one.statement.name: one.result for one in judge(tables, others, seeds=seeds)}
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
        for verdict, paper in zip(decided, printed, strict=True)
    ]
    return pd.DataFrame(lines)


def tables_of_runs(rows: Sequence[Row], runs: Path) -> dict[str, pd.DataFrame]:
    """The tables that are not shown: of what the runs behind these rows say of themselves."""
    return {
        COST: cost_table(rows, runs),
        TRAINED: trained_table(rows, runs),
        PRETRAINING: pretraining_table(rows, runs),
    }


def tables_of_seeds(
    shown: Sequence[ShownConfig], rows: Iterable[Row], runs: Path
) -> dict[int, dict[str, pd.DataFrame]]:
    """All tables once more, of each seed alone; nothing where there is one seed of everything.

    Args:
        shown: the tables that are shown.
        rows: models of any of them.
        runs: folder of the runs.
    """
    rows = list(rows)
    seeds = sorted({seed_of(run) for row in rows for run in row.runs})
    made: dict[int, dict[str, pd.DataFrame]] = {}
    for seed in seeds if len(seeds) > 1 else ():
        made[seed] = tables_of_runs([row.of_seed(seed) for row in rows], runs)
        for one in shown:
            own = [row.of_seed(seed) for row in one.rows]
            made[seed][one.name] = build_table(one.name, own, one.evaluations, paper=False)
    return made


def write_claims(frame: pd.DataFrame, path: Path) -> None:
    """Write the verdicts as CSV."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def make_claims(path: Path) -> None:
    """`maect claims claims.yaml`: beside it the verdicts as CSV and as a page."""
    config = ClaimsConfig.read(path)
    tables = {file.stem: read_table(file) for file in config.tables}
    shown = [ShownConfig.read(file.with_suffix(".yaml")) for file in config.tables]
    verdicts = claims_table(
        tables | tables_of_runs(config.rows, config.runs),
        tables_of_seeds(shown, config.rows, config.runs),
    )
    write_claims(verdicts, path.with_suffix(".csv"))
    write_text(path.with_suffix(".html"), claims_page(verdicts))
