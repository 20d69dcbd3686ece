"""What an experiment shows: the lines of its tables and figures, and less of it by `--config`."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from maect.core.errors import UserError
from maect.core.names import check_names
from maect.experiment.schema import ExperimentSpec, Rows

REPLACED = ("seeds", "starting_from")
CHANGES = (*REPLACED, "tables", "figures", "protocols")
"""What `--config` may say beside `experiment`: other values, and less of what the file asks."""
Line = tuple[str, str, list[str]]
"""Architecture, method and the runs behind it, one a seed."""


class Model(Protocol):
    """What a line needs to know of a run."""

    @property
    def architecture(self) -> str:
        """How tables name the encoder."""

    @property
    def method(self) -> str:
        """Name of the method in tables."""


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


def seedless(run: str) -> str:
    """The name of a run without its seed."""
    return re.sub(r"-s\d+$", "", run)


def matching(pattern: str, runs: Iterable[str]) -> list[str]:
    """Runs of all seeds whose name matches a pattern such as `ct_*`."""
    return [name for name in runs if fnmatch.fnmatchcase(seedless(name), pattern)]


def _pairs(rows: Rows) -> Iterator[tuple[str | None, str]]:
    """Method (None: the run's own) and pattern of each row."""
    for row in rows:
        yield from [(None, row)] if isinstance(row, str) else row.items()


def lines(
    place: str, rows: Rows, runs: Mapping[str, Model], shown: Iterable[str], partial: bool = False
) -> list[Line]:
    """The lines of a table or figure.

    Args:
        place: where the rows are written, for messages.
        rows: as written; runs in the order of the rows, then in that of `shown`.
        runs: all runs by name.
        shown: names of the runs that have anything to show.
        partial: leave out rows of runs that have nothing to show, since less was asked for.

    Raises:
        UserError: a row that matches nothing, or two runs on one line that are not seeds.
    """
    shown = list(shown)
    found: dict[tuple[str, str], list[str]] = {}
    for method, pattern in _pairs(rows):
        matched = matching(pattern, shown)
        if not matched and not (partial and matching(pattern, runs)):
            raise UserError(f"{place}: no evaluated run is named {pattern!r}")
        for name in matched:
            key = runs[name].architecture, method or runs[name].method
            line = found.setdefault(key, [])
            if line and seedless(line[0]) != seedless(name):
                raise UserError(
                    f"{place}: {line[0]} and {name} are both {' '.join(key)}; "
                    f"give one another name with `METHOD: {name}`"
                )
            if name not in line:
                line.append(name)
    return [(architecture, method, line) for (architecture, method), line in found.items()]
