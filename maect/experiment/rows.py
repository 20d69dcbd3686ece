"""What an experiment shows: the lines of its tables and figures, and less of it by `--config`."""

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from maect.core.errors import UserError
from maect.core.names import check_names
from maect.experiment.expand import Run, begins_with, seedless
from maect.experiment.schema import ExperimentSpec, Rows
from maect.report.config import Row

REPLACED = ("seeds", "starting_from")
CHANGES = (*REPLACED, "tables", "figures", "protocols")
"""What `--config` may say beside `experiment`: other values, and less of what the file asks."""


def restricted(spec: ExperimentSpec, changes: Mapping[str, Any]) -> ExperimentSpec:
    """An experiment that asks for less than its file does.

    Args:
        spec: the file.
        changes: `tables`, `figures` and `protocols`, each a list or names with commas, leave only
            these.

    Raises:
        UserError: a table, figure or protocol that the file does not ask for.
    """
    new: dict[str, Any] = {}
    for kind in ("tables", "figures"):
        if kind in changes:
            rows, wanted = getattr(spec, kind), names(changes[kind])
            check_names(f"--config {kind}", wanted, rows)
            new[kind] = {name: rows[name] for name in wanted}
    if "protocols" in changes:
        wanted = names(changes["protocols"])
        check_names("--config protocols", wanted, [p for e in spec.evaluate for p in e.protocols])
        new["evaluate"] = [
            entry.model_copy(update={"protocols": [p for p in entry.protocols if p in wanted]})
            for entry in spec.evaluate
        ]
    return spec.model_copy(update=new)


def names(value: Any) -> list[str]:
    """`a,b`, a list or a single value as names; nothing (`tables=`): none."""
    if isinstance(value, str):
        value = value.split(",")
    elif not isinstance(value, list | tuple):
        value = [] if value is None else [value]
    return [name for item in value if (name := str(item).strip())]


def matching(pattern: str, runs: Mapping[str, Run]) -> list[str]:
    """Runs of all seeds that a name or a pattern such as `ct_*` names.

    A run that is trained for an evaluation has to be named in full.
    """
    return [
        name
        for name, run in runs.items()
        if (name == pattern if run.scored_by else fnmatch.fnmatchcase(seedless(name), pattern))
    ]


def _pairs(rows: Rows) -> Iterator[tuple[str | None, str]]:
    """Method (None: the run's own) and pattern of each row."""
    for row in rows:
        yield from [(None, row)] if isinstance(row, str) else row.items()


def lines(
    where: str, rows: Rows, runs: Mapping[str, Run], shown: Collection[str], partial: bool = False
) -> list[Row]:
    """The lines of a table or figure.

    Args:
        where: where the rows are written, for messages.
        rows: as written; runs in the order of the rows, then in that of `runs`.
        runs: all runs by name.
        shown: names of the runs that have anything to show.
        partial: leave out rows of runs that have nothing to show, since less was asked for.

    Raises:
        UserError: a row that matches nothing, or two runs on one line that are not seeds.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for method, pattern in _pairs(rows):
        named = matching(pattern, runs)
        matched = [name for name in named if name in shown]
        if not matched and not (partial and named):
            raise UserError(f"{where}: no evaluated run is named {pattern!r}")
        for name in matched:
            key = runs[name].architecture, method or runs[name].method
            line = found.setdefault(key, [])
            if line and seedless(line[0]) != seedless(name):
                raise UserError(
                    f"{where}: {line[0]} and {name} are both {' '.join(key)}; "
                    f"give one another name with `METHOD: {name}`"
                )
            if name not in line:
                line.append(name)
    return [Row(*key, tuple(line)) for key, line in found.items()]


def without_twins(rows: Iterable[Row], runs: Mapping[str, Run]) -> list[Row]:
    """The lines of a table without those that another one, `METHOD_public`, says the same as.

    Both begin with the same file: there is nothing to compare.
    """
    rows = list(rows)
    first = {(row.architecture, row.method): begins_with(row.runs[0], runs).weights for row in rows}
    return [
        row
        for row in rows
        if (weights := first[row.architecture, row.method]) is None
        or weights != first.get((row.architecture, f"{row.method}_public"))
    ]
