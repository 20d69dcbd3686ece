"""Checks the paper's statements (`statements.py`) against measured tables."""

import itertools
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

from maect.core.files import seek_record, write_text
from maect.core.seeds import seed_of
from maect.report.configs import ClaimsConfig, Row, ShownConfig
from maect.report.registry import TABLES
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
    write_table,
)

HOLDS, FAILS, NOISE, OPEN = "holds", "fails", "within noise", "not measured"
UNEQUAL = "not comparable"
Key = tuple[str, str, str, str]
"""Table, architecture, method, metric."""
Tables = Mapping[str, pd.DataFrame]
Seeds = Mapping[int, Tables]
"""The same tables of each seed, or of each set of few labels, alone."""
NOTHING: Seeds = MappingProxyType({})

VALUE = re.compile(r"""([a-z]\w*)\.(\w+|\*)(?:\.(\w+)|\["([\w.]+)"\])\.(\w+)""")
COST, PRETRAINING, TRAINED = "cost", "pretraining", "trained"
"""Tables beside those that are shown: what training cost, what its first stage logged, and which
models were trained here."""
# What the paper prints as equal is equal.
TOLERANCE = 1e-9
LOW_SHOT = "low_shot"
LEVEL = 0.05
"""Of the paired t-tests, two-sided: three differences exceed 2.5 of their standard deviations."""
DEVIATIONS = 2.5
"""What a difference of independent values has to exceed, in its standard deviations."""
ACCURACIES = frozenset({
    "low_shot", "ablation", "combined", "robustness", "reimplementation", "sensitivity", "extended",
    "concat_probe", "fine_tune", "huge14", "oracle", "efficient_probe",
})  # fmt: skip
"""Tables of how many of the evaluated images are classified correctly, in percent."""
CLUSTERED = frozenset({"clustering", "clustering_best", "clustering_mean"})
"""Tables with an `accuracy` of clusters of all evaluated images: it varies more than that error."""


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
    """Whether that is of a part of what varies only: no one knows it of the rest."""
    missing: tuple[Key, ...]
    decimals: int = 2
    """To print the difference with."""
    limit: bool = False
    """Whether the right side is a number, so that the left one is printed."""
    chance: float = math.nan
    """How probable it is that chance makes such a difference; NaN where its error is not known."""
    exact: bool = False
    """Whether nothing in it is random."""
    of_sets: tuple[float, ...] = ()
    """The difference with each set of few labels alone, where these are known."""
    epochs: tuple[float, ...] = ()
    """Those of the models' pre-trainings, where they are not the same: no fair comparison."""

    @property
    def significant(self) -> bool | None:
        """Return whether the difference is more than chance; None where that is not known."""
        if self.holds is None or math.isnan(self.chance):
            return None
        if self.chance > LEVEL:
            return False
        return None if self.at_least else True


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
        """Return whether chance may have made a failing comparison, being one of so many."""
        known = sorted(one.chance for one in self._failing if not math.isnan(one.chance))
        # Those that hold have a probability of 1 to fail like this, and come last.
        beyond = [p for k, p in enumerate(known) if p * (len(self.comparisons) - k) <= LEVEL]
        return failing.chance > max(beyond, default=0.0)

    @property
    def significant(self) -> str:
        """Return `yes`, `no`, or `one seed` for what decides.

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
        known = [one.significant or one.exact for one in decide]  # one is enough to fail
        return "yes" if (all if self.result == HOLDS else any)(known) else "one seed"

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


def _key(match: re.Match[str]) -> Key:
    table, architecture, method, quoted, metric = match.groups()
    return table, architecture, method or quoted, metric


def _look_up(tables: Tables, key: Key, suffix: str) -> float:
    name, architecture, method, metric = key
    if name not in tables or f"{metric}{suffix}" not in tables[name]:
        return math.nan
    # Not by masks of pandas: there are thousands of questions, each about a dozen lines.
    columns = (tables[name][column] for column in ("architecture", "method", f"{metric}{suffix}"))
    lines = zip(*columns, strict=True)
    return next((float(value) for *of, value in lines if of == [architecture, method]), math.nan)


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
        (of, spread)
        for frame in tables.values()
        if column in frame
        for of, spread in zip(frame["architecture"], frame[column], strict=True)
    ]
    # What is the same for all seeds says nothing of others.
    return max((float(x) for of, x in known if of == architecture and x > 0), default=math.nan)


def _is_trained(tables: Tables, key: Key) -> bool:
    """Return whether a model was trained here: what is imported has one seed."""
    _, architecture, method, _ = key
    return architecture in _architectures(tables, TRAINED, method)


def chance_of(differences: Sequence[float]) -> float:
    """Probability of such a mean of paired differences if it were zero, by a two-sided t-test."""
    from scipy.stats import t as student  # takes a while

    mean, error = abs(statistics.fmean(differences)), statistics.stdev(differences)
    if mean <= TOLERANCE:
        return 1.0
    if error == 0:
        return 0.0
    return 2 * float(student.sf(mean / error * math.sqrt(len(differences)), len(differences) - 1))


def _chance_of(difference: float, std: float) -> float:
    """That of one difference, where `DEVIATIONS` of its standard deviations are `LEVEL`."""
    if abs(difference) <= DEVIATIONS * std:
        return 1.0
    of = statistics.NormalDist().cdf
    return LEVEL * of(-abs(difference) / std) / of(-DEVIATIONS) if std else 0.0


def _error_of_images(key: Key, value: float, images: Mapping[str, int]) -> float:
    """Standard deviation of an accuracy over other images, in percent; NaN: none is known."""
    table, *_, metric = key
    counts = table in ACCURACIES or (table in CLUSTERED and metric == "accuracy")
    n = images.get(split_of(table, metric))
    if not counts or not n or not 0 <= value <= 100:
        return math.nan
    return math.sqrt(value * (100 - value) / n)


def split_of(table: str, metric: str) -> str:
    """The split whose images a number is of."""
    if table != "robustness":
        return "val"
    return next((one.source for one in TABLES[table].metrics if one.name == metric), metric)


def compare(
    text: str,
    tables: Tables,
    suffix: str = "",
    seeds: Seeds = NOTHING,
    sets: Seeds = NOTHING,
    images: Mapping[str, int] = MappingProxyType({}),
) -> Comparison:
    """Decide one comparison, without `*`.

    A tuned encoder of a seed begins with the MAE of this seed. So the difference is computed seed
    by seed where all models that were trained here have seeds in common, and its mean and standard
    deviation are over these: a paired t-test decides. With fewer than two of them the deviation is
    that of a function of independent values, to first order: a model of one seed has the largest
    that any of its architecture has in this metric, and the binomial error of an accuracy beside
    it; `DEVIATIONS` of them decide. An imported one counts as exact where none comes with it. With
    few labels the difference also has to pass a paired t-test over the sets of labels.

    Args:
        suffix: `_paper` decides it with the paper's own numbers.
        seeds: the tables of each seed alone.
    """
    sides = re.split(r" ([<>]=?) ", text)
    if len(sides) != 3:
        raise ValueError(f"not one comparison: {text}")
    values = {key: _look_up(tables, key, suffix) for key in map(_key, VALUE.finditer(text))}
    missing = tuple(key for key, value in values.items() if math.isnan(value))
    spreads = {key: math.nan if suffix else _deviation(tables, key) for key in values}
    varying = {key: spread for key, spread in spreads.items() if spread is not None}

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
    few = [k for k in values if not all(math.isnan(_look_up(s, k, "")) for s in sets.values())]
    of_sets = [one - other for one, other in (both(values | own) for own in _in_common(few, sets))]
    std, at_least, chance = math.nan, False, math.nan
    if len(of_seeds) > 1:
        differences = [one - other for one, other in of_seeds]
        std, chance = statistics.stdev(differences), chance_of(differences)
    elif not suffix:
        known = {}
        for key, value in values.items():
            errors = varying.get(key, math.nan), _error_of_images(key, value, images)
            known[key] = math.hypot(*filter(math.isfinite, errors))
        if any(known.values()):
            one, other = both(values | {k: ufloat(values[k], e) for k, e in known.items() if e})
            std, at_least = std_dev(one - other), any(map(math.isnan, varying.values()))
            chance = _chance_of(margin, std)
    by_labels = chance_of(of_sets) if len(of_sets) > 1 else math.nan
    if by_labels > LEVEL or not math.isnan(chance):
        chance = max(p for p in (chance, by_labels) if not math.isnan(p))
    return Comparison(
        label,
        margin >= -TOLERANCE if sign.endswith("=") else margin > TOLERANCE,
        left,
        right,
        margin,
        std,
        at_least,
        (),
        decimals=_decimals(margin, values.values()),
        limit=not VALUE.search(sides[2]),
        chance=chance,
        exact=math.isnan(std) and all(key[0] == COST for key in values),
        of_sets=tuple(of_sets),
        epochs=() if suffix else _epochs(tables, values),
    )


def _epochs(tables: Tables, keys: Iterable[Key]) -> tuple[float, ...]:
    """Epochs of the pre-trainings that the models begin with, if they are not the same."""
    frame = tables.get(TRAINED)
    if frame is None or "pretraining_epochs" not in frame:
        return ()
    known = (_look_up(tables, (TRAINED, *key[1:3], "pretraining_epochs"), "") for key in keys)
    found = sorted({value for value in known if not math.isnan(value)})
    return tuple(found) if len(found) > 1 else ()


def _in_common(varying: Collection[Key], seeds: Seeds) -> list[dict[Key, float]]:
    """These values of each seed, or set of labels, that has all of them."""
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
    lines = zip(tables[table]["architecture"], tables[table]["method"], strict=True)
    return list(dict.fromkeys(architecture for architecture, of in lines if of == method))


def judge(
    tables: Tables, statements: Iterable[Statement] = STATEMENTS, suffix: str = "", **more: Any
) -> list[Verdict]:
    """The verdict on every statement, in the paper's order; `more` is what `compare` takes."""
    return [
        Verdict(
            statement,
            tuple(
                compare(one, tables, suffix, **more)
                for text in statement.comparisons
                for one in expand(text, tables)
            ),
        )
        for statement in statements
    ]


def claims_table(tables: Tables, **more: Any) -> pd.DataFrame:
    """All statements with their verdicts.

    Returns:
        `claim`, `statement`, `paper` (where it is made), `verdict` (holds, fails, within noise,
        not comparable, not measured), `significant` (yes, no, `one seed`, or empty), `numbers`,
        `paper_verdict` (by the paper's own printed numbers), `plain_knn` (on features that are not
        standardised, where k-NN decides), `expression`.
    """
    statements = [*STATEMENTS]
    decided = judge(tables, statements, **more)
    printed = judge(printed_tables(), statements, "_paper")
    on_plain = (
        replace(
            one, comparisons=tuple(c.replace(".knn_standardized", ".knn") for c in one.comparisons)
        )
        for one in statements
    )
    others = [one for one in on_plain if one not in statements]
    plain = {one.statement.name: one.result for one in judge(tables, others, **more)}
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
    """All tables once more, of each seed alone; nothing where there is one seed of everything."""
    rows = list(rows)
    seeds = sorted({seed_of(run) for row in rows for run in row.runs})
    made: dict[int, dict[str, pd.DataFrame]] = {}
    for seed in seeds if len(seeds) > 1 else ():
        made[seed] = tables_of_runs([row.of_seed(seed) for row in rows], runs)
        for one in shown:
            made[seed][one.name] = build_table(
                one.name, one.rows, one.evaluations, paper=False, seed=seed
            )
    return made


def tables_of_sets(shown: Sequence[ShownConfig]) -> dict[int, dict[str, pd.DataFrame]]:
    """The tables with few labels once more, of each set of labels alone."""
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
    """Read tables, and what tells the errors of their numbers.

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
    """`maect page claims.yaml`: beside it the verdicts as CSV and as a page."""
    config = ClaimsConfig.read(path)
    tables, more = evidence(config.tables, config.rows, config.runs, config.images)
    verdicts = claims_table(tables, **more)
    write_table(verdicts, path.with_suffix(".csv"))
    write_text(path.with_suffix(".html"), claims_page(verdicts))
