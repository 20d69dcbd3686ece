"""Check the paper's statements (`statements.py`) against measured tables."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from maect.core.files import seek_record
from maect.records import seed_of
from maect.report.bounds import (
    COST,
    LEVEL,
    PRETRAINING,
    TRAINED,
    Comparison,
    MeasuredModels,
    Tables,
    compare,
)
from maect.report.configs import ClaimsConfig, Row, ShownConfig
from maect.report.registry import TABLES
from maect.report.statements import STATEMENTS, Statement
from maect.report.tables import (
    build_table,
    cost_table,
    pretraining_table,
    printed_tables,
    read_table,
    trained_table,
    write_table,
)

HOLDS, FAILS, NOISE, OPEN = "holds", "fails", "within noise", "not measured"
UNEQUAL = "not comparable"
LOW_SHOT = "low_shot"
STANDARDIZED = "knn_standardized"


@dataclass(frozen=True)
class Verdict:
    """A statement with the comparisons that decide it."""

    statement: Statement
    comparisons: tuple[Comparison, ...]

    @property
    def result(self) -> str:
        """`holds` if all comparisons do, `fails` if one does not, else `not measured`.

        `within noise` where that rests on a difference that chance may have made: one that had to
        hold, or all those that do not. Of many comparisons some fail by chance: Hochberg
        (Biometrika 75, 1988) says how small a probability has to be. `not comparable` if models
        differ in their pre-training.
        """
        if any(one.epochs for one in self.comparisons):
            return UNEQUAL
        if self._failing:
            return NOISE if all(map(self._by_chance, self._failing)) else FAILS
        if any(one.holds is None for one in self.comparisons):
            return OPEN
        return NOISE if any(one.significant is False for one in self.comparisons) else HOLDS

    @property
    def _failing(self) -> list[Comparison]:
        return [one for one in self.comparisons if one.holds is False]

    def _by_chance(self, failing: Comparison) -> bool:
        """Return whether chance may explain a failing comparison among this many."""
        known = sorted(one.chance for one in self._failing if not math.isnan(one.chance))
        # Those that hold have a probability of 1 to fail like this, and come last.
        beyond = [p for k, p in enumerate(known) if p * (len(self.comparisons) - k) <= LEVEL]
        return failing.chance > max(beyond, default=0.0)

    @property
    def significant(self) -> str:
        """Return `yes`, `no` or `one seed`: whether the deciding differences are beyond chance.

        `one seed`: beyond the error of the images, but nothing says how much a training varies.
        Empty where nothing is random or nothing is decided.
        """
        if self.result in (OPEN, UNEQUAL, NOISE):
            return "no" if self.result == NOISE else ""
        decide: Sequence[Comparison] = self.comparisons
        if self.result == FAILS:
            decide = [one for one in self._failing if not self._by_chance(one)]
        if all(one.exact for one in decide):
            return ""
        known = [one.significant or one.exact for one in decide]
        # One is enough to fail.
        is_sure = all(known) if self.result == HOLDS else any(known)
        return "yes" if is_sure else "one seed"

    @property
    def numbers(self) -> str:
        """Return the comparisons in numbers, then missing numbers by table and model."""
        parts = []
        missing: dict[str, dict[str, dict[str, None]]] = {}
        for one in self.comparisons:
            for table, architecture, method, metric in one.missing:
                of_table = missing.setdefault(table, {})
                of_table.setdefault(f"{architecture} {method}", {})[metric] = None
            if one.holds is None:
                continue
            spread = "" if math.isnan(one.std) else f" ± {one.std:.{one.decimals}f}"
            spread += " or more" if one.at_least and spread else ""
            marks = [] if one.holds or one.epochs else ["fails"]
            if one.significant is False and not one.epochs:
                marks.append("within noise")
            elif one.holds is False and self._by_chance(one) and not one.epochs:
                marks.append(f"within noise of {len(self.comparisons)} comparisons")
            if one.of_sets:
                of_each = ", ".join(f"{value:+.1f}" for value in one.of_sets)
                marks.append(f"by sets of labels {of_each}")
            if one.epochs:
                lengths = " and ".join(f"{value:g}" for value in one.epochs)
                marks.append(f"pre-trained for {lengths} epochs")
            mark = f" ({'; '.join(marks)})" if marks else ""
            value, sign = (one.left, "") if one.limit else (one.left - one.right, "+")
            parts.append(f"{one.text}: {value:{sign}.{one.decimals}f}{spread}{mark}")
        for table, models in missing.items():
            named = (f"{model} ({', '.join(metrics)})" for model, metrics in models.items())
            parts.append(f"needs {table}: {', '.join(named)}")
        return "; ".join(parts)


def judge(
    tables: Tables, statements: Iterable[Statement] = STATEMENTS, suffix: str = "", **more: Any
) -> list[Verdict]:
    """Decide every statement, in the paper's order; `more` are keyword arguments of `compare`."""
    measured = MeasuredModels(tables)
    return [
        Verdict(one, tuple(compare(b, tables, suffix, **more) for b in one.bounds(measured)))
        for one in statements
    ]


def claims_table(tables: Tables, **more: Any) -> pd.DataFrame:
    """Return all statements with their verdicts.

    Returns:
        `claim`, `statement`, `paper` (where it is made), `verdict` (holds, fails, within noise,
        not comparable, not measured), `significant` (yes, no, `one seed`, or empty), `numbers`,
        `paper_verdict` (by the paper's own printed numbers), `plain_knn` (on features that are not
        standardised, where k-NN decides), `expression`.
    """
    decided = judge(tables, **more)
    printed = judge(printed_tables(), suffix="_paper")
    by_knn = [one for one in STATEMENTS if STANDARDIZED in one.expression]
    plain = {
        name: {key: _plain(one) for key, one in of_each.items()}
        for name, of_each in more.items()
        if name in ("seeds", "sets")
    }
    on_plain = judge(_plain(tables), by_knn, **more | plain)
    of_plain = {one.statement.name: one.result for one in on_plain}
    lines = [
        {
            "claim": verdict.statement.name,
            "statement": verdict.statement.text,
            "paper": verdict.statement.paper,
            "verdict": verdict.result,
            "significant": verdict.significant,
            "numbers": verdict.numbers,
            "paper_verdict": "" if paper.result == OPEN else paper.result,
            "plain_knn": of_plain.get(verdict.statement.name, ""),
            "expression": verdict.statement.expression,
        }
        for verdict, paper in zip(decided, printed, strict=True)
    ]
    return pd.DataFrame(lines)


def _plain(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the tables with k-NN on features as they are in place of standardised ones."""
    made = {}
    for name, frame in tables.items():
        ends = ("", "_std", "_paper")
        columns = {f"knn{end}": f"{STANDARDIZED}{end}" for end in ends if f"knn{end}" in frame}
        others = [f"{STANDARDIZED}{end}" for end in ends]
        made[name] = frame.drop(columns=others, errors="ignore").rename(columns=columns)
    return made


def tables_of_runs(rows: Sequence[Row], runs: Path) -> dict[str, pd.DataFrame]:
    """Return internal tables (cost, trained models, pre-training loss) from the runs' records."""
    return {
        COST: cost_table(rows, runs),
        TRAINED: trained_table(rows, runs),
        PRETRAINING: pretraining_table(rows, runs),
    }


def tables_of_seeds(
    shown: Sequence[ShownConfig], rows: Iterable[Row], runs: Path
) -> dict[int, dict[str, pd.DataFrame]]:
    """Build all tables for each seed alone; {} if there is one seed of everything."""
    rows = list(rows)
    seeds = sorted({seed_of(run) for row in rows for run in row.runs})
    made: dict[int, dict[str, pd.DataFrame]] = {}
    if len(seeds) < 2:
        return made
    for seed in seeds:
        made[seed] = tables_of_runs([row.of_seed(seed) for row in rows], runs)
        for one in shown:
            made[seed][one.name] = build_table(
                one.name, one.rows, one.evaluations, paper=False, seed=seed
            )
    return made


def tables_of_sets(shown: Sequence[ShownConfig]) -> dict[int, dict[str, pd.DataFrame]]:
    """Build the tables with few labels for each set of labels alone."""
    few = [o for o in shown if any(m.evaluation == LOW_SHOT for m in TABLES[o.name].metrics)]
    made: dict[int, dict[str, pd.DataFrame]] = {}
    for part in itertools.count():
        of_part = {
            one.name: build_table(one.name, one.rows, one.evaluations, paper=False, part=part)
            for one in few
        }
        known = {n: f for n, f in of_part.items() if f.select_dtypes(float).notna().any(axis=None)}
        if not known:
            return made
        made[part] = known
    return made


def evidence(
    files: Iterable[Path], rows: Sequence[Row], runs: Path, indices: Mapping[str, Path]
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Read tables, and the data that decide the errors of their numbers.

    Args:
        files: CSV files of tables, each beside its resolved file.
        rows: the models whose runs say how they were trained.
        indices: index of the shards of each split.

    Returns:
        The tables by name; and what `compare` takes: `seeds`, `sets`, `images`.
    """
    files = list(files)
    shown = [ShownConfig.read(file.with_suffix(".yaml")) for file in files]
    counts = {split: seek_record(index).get("n") for split, index in indices.items()}
    tables = {file.stem: read_table(file) for file in files} | tables_of_runs(rows, runs)
    return tables, {
        "seeds": tables_of_seeds(shown, rows, runs),
        "sets": tables_of_sets(shown),
        "images": {split: n for split, n in counts.items() if n},
    }


def make_claims(path: Path) -> None:
    """`maect page claims.yaml`: beside it the verdicts as CSV."""
    config = ClaimsConfig.read(path)
    tables, more = evidence(config.tables, config.rows, config.runs, config.images)
    verdicts = claims_table(tables, **more)
    write_table(verdicts, path.with_suffix(".csv"))
