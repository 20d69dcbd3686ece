"""Checks the paper's statements (`statements*.py`) against measured tables.

A statement is a list of comparisons, such as `low_shot.*.ct_min.knn > low_shot.*.mae.knn`. A value
is TABLE.ARCHITECTURE.METHOD.METRIC (`x.large["topk_1"].knn` for names with a dot); `*` is every
architecture for which the experiment has all of the comparison's models that are named with it.
Allowed beside it: numbers, + - * / and parentheses, and one of > >= < <=.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from maect.core.errors import UserError
from maect.core.files import write_text
from maect.report.statements import RESULTS, Statement
from maect.report.statements_analysis import ANALYSIS
from maect.report.tables import DECIMALS, printed_tables

STATEMENTS = RESULTS + ANALYSIS
HOLDS, FAILS, OPEN = "holds", "fails", "not measured"
Key = tuple[str, str, str, str]
Tables = Mapping[str, pd.DataFrame]

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ORDER: dict[type[ast.cmpop], tuple[str, float]] = {
    ast.Gt: (">", 1.0),
    ast.GtE: ("≥", 1.0),
    ast.Lt: ("<", -1.0),
    ast.LtE: ("≤", -1.0),
}
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
    deviation: float
    """Standard deviation of the difference over seeds; NaN with one seed of everything."""
    missing: tuple[Key, ...]
    decimals: int = 2
    """To print the difference with."""

    @property
    def significant(self) -> bool | None:
        """Whether the difference exceeds its deviation; None where that is not known."""
        known = self.holds is not None and not math.isnan(self.deviation)
        return abs(self.difference) > self.deviation if known else None


@dataclass(frozen=True)
class Verdict:
    """A statement with the comparisons that decide it."""

    statement: Statement
    comparisons: tuple[Comparison, ...]

    @property
    def result(self) -> str:
        """`holds` if all comparisons do, `fails` if one does not, else `not measured`."""
        found = {comparison.holds for comparison in self.comparisons}
        if False in found:
            return FAILS
        return HOLDS if found == {True} else OPEN

    @property
    def significant(self) -> str:
        """`yes` if every comparison behind the result exceeds its deviation over seeds."""
        if self.result == OPEN:
            return ""
        decisive = [c for c in self.comparisons if c.holds is (self.result == HOLDS)]
        found = {comparison.significant for comparison in decisive}
        return "" if None in found else "no" if False in found else "yes"

    @property
    def numbers(self) -> str:
        """The comparisons in numbers, and which models of which tables are missing."""
        parts = []
        missing: dict[str, dict[str, None]] = {}
        for one in self.comparisons:
            for table, architecture, method, _ in one.missing:
                missing.setdefault(table, {})[f"{architecture} {method}"] = None
            if one.holds is None:
                continue
            deviation = "" if math.isnan(one.deviation) else f" ± {one.deviation:.{one.decimals}f}"
            mark = "" if one.holds else " (fails)"
            difference = f"{one.left - one.right:+.{one.decimals}f}"
            parts.append(f"{one.text}: {difference}{deviation}{mark}")
        parts += [f"needs {table}: {', '.join(models)}" for table, models in missing.items()]
        return "; ".join(parts)


def _key(node: ast.expr) -> Key | None:
    """The value that a dotted name stands for, or None if it is something else."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
            node = node.value
        else:
            return None
    parts.append(node.id)
    return tuple(reversed(parts)) if len(parts) == 4 else None  # type: ignore[return-value]


def keys_of(node: ast.AST) -> list[Key]:
    """Every value that an expression reads."""
    if isinstance(node, ast.expr) and (key := _key(node)) is not None:
        return [key]
    return [key for child in ast.iter_child_nodes(node) for key in keys_of(child)]


def _number(node: ast.expr, values: Mapping[Key, float]) -> float:
    if (key := _key(node)) is not None:
        return values[key]
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_number(left, values), _number(right, values))
    raise ValueError(f"not part of a comparison: {ast.unparse(node)}")


def _look_up(tables: Tables, key: Key, suffix: str) -> float:
    name, architecture, method, metric = key
    if name not in tables or f"{metric}{suffix}" not in tables[name]:
        return math.nan
    frame = tables[name]
    line = frame[(frame["architecture"] == architecture) & (frame["method"] == method)]
    return float(line[f"{metric}{suffix}"].iloc[0]) if len(line) else math.nan


def compare(text: str, tables: Tables, suffix: str = "") -> Comparison:
    """Decide one comparison, without `*`.

    The deviation is that of a function of independent values, to first order. A value without one
    beside others that have one, such as that of an imported encoder, counts as exact.

    Args:
        text: the comparison.
        tables: by name, as `build_table` makes them.
        suffix: `_paper` decides it with the paper's own numbers.

    Raises:
        ValueError: not a comparison in the language above.
    """
    body = ast.parse(text, mode="eval").body
    if not isinstance(body, ast.Compare) or len(body.ops) != 1 or type(body.ops[0]) not in _ORDER:
        raise ValueError(f"not one comparison: {text}")
    sign, direction = _ORDER[type(body.ops[0])]
    keys = list(dict.fromkeys(keys_of(body)))
    values = {key: _look_up(tables, key, suffix) for key in keys}
    right_node = body.comparators[0]

    def difference(values: Mapping[Key, float]) -> float:
        return direction * (_number(body.left, values) - _number(right_node, values))

    left, right = _number(body.left, values), _number(right_node, values)
    missing = tuple(key for key in keys if math.isnan(values[key]))
    label = f"{_short(body.left)} {sign} {_short(right_node)}"
    if missing:
        return Comparison(label, None, left, right, math.nan, math.nan, missing)
    here = difference(values)
    spreads = {key: math.nan if suffix else _look_up(tables, key, "_std") for key in keys}
    known = {key: spread for key, spread in spreads.items() if not math.isnan(spread)}
    variance = 0.0 if known else math.nan
    for key, spread in known.items():
        step = 1e-4 * max(1.0, abs(values[key]))
        slope = (difference(values | {key: values[key] + step}) - here) / step
        variance += (slope * spread) ** 2
    holds = here >= -TOLERANCE if sign in "≥≤" else here > TOLERANCE
    decimals = _decimals(here, values.values())
    return Comparison(label, holds, left, right, here, math.sqrt(variance), (), decimals)


def _decimals(difference: float, values: Iterable[float]) -> int:
    """Two for percents, all there are for parts of 1, and as many as show a difference."""
    if all(abs(value) <= 1 for value in values):
        return DECIMALS
    if abs(difference) <= TOLERANCE:
        return 2
    return next((n for n in range(2, DECIMALS) if round(difference, n)), DECIMALS)


def _short(node: ast.expr) -> str:
    """An expression without the tables' names."""
    text = ast.unparse(node)
    for key in sorted(keys_of(node), key=lambda key: -len(key[0])):
        text = text.replace(f"{key[0]}.{key[1]}", key[1])
    return text


def expand(text: str, tables: Tables) -> list[str]:
    """One comparison for every architecture that `*` stands for; itself where there is no `*`.

    That is every one with a row of each model named with `*`: others cannot be compared.
    """
    if ".*." not in text:
        return [text]
    template = text.replace(".*.", ".any.")
    needed = [key for key in keys_of(ast.parse(template, mode="eval")) if key[1] == "any"]
    have = [_architectures(tables, table, method) for table, _, method, _ in needed]
    found = [one for one in have[0] if all(one in others for others in have)]
    return [text.replace(".*.", f".{architecture}.") for architecture in found] or [template]


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


def claims_table(tables: Tables, statements: Iterable[Statement] = STATEMENTS) -> pd.DataFrame:
    """All statements with their verdicts.

    Returns:
        `claim`, `statement`, `paper` (where it is made), `verdict` (holds, fails, not measured),
        `significant` (yes, no, or empty with one seed of everything), `numbers`, `paper_verdict`
        (by the paper's own printed numbers), `expression`.
    """
    statements = list(statements)
    printed = judge(printed_tables(), statements, "_paper")
    lines = [
        {
            "claim": verdict.statement.name,
            "statement": verdict.statement.text,
            "paper": verdict.statement.paper,
            "verdict": verdict.result,
            "significant": verdict.significant,
            "numbers": verdict.numbers,
            "paper_verdict": "" if paper.result == OPEN else paper.result,
            "expression": "; ".join(verdict.statement.comparisons),
        }
        for verdict, paper in zip(judge(tables, statements), printed, strict=True)
    ]
    return pd.DataFrame(lines)


def write_claims(frame: pd.DataFrame, path: Path) -> None:
    """Write the verdicts as CSV."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def read_claims(path: Path) -> pd.DataFrame:
    """Read what `write_claims` wrote.

    Raises:
        UserError: no such file.
    """
    try:
        return pd.read_csv(path, keep_default_na=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; build the claims first") from None
