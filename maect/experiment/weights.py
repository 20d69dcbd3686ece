"""Runs of an experiment that import public weights instead of training."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from maect.experiment.rows import Line, seedless

if TYPE_CHECKING:
    from maect.experiment.expand import Run


def shared_by_seeds(runs: Mapping[str, "Run"]) -> dict[str, "Run"]:
    """Imported weights have no seed: runs of every seed start from the same ones."""
    return {
        name: replace(run, source=seedless(run.source))
        if run.source and run.source not in runs and _is_import(runs.get(seedless(run.source)))
        else run
        for name, run in runs.items()
    }


def _is_import(run: "Run | None") -> bool:
    return run is not None and run.weights is not None


def from_scratch(runs: Mapping[str, "Run"]) -> set[str]:
    """Pre-trainings, and every run that starts from one, directly or not."""
    return {name for name in runs if _first(name, runs).stage == "pretrain"}


def without_twins(rows: Iterable[Line], runs: Mapping[str, "Run"]) -> list[Line]:
    """The lines of a table without those that another one, `METHOD_public`, says the same as.

    Both begin with the same file: there is nothing to compare.
    """
    rows = list(rows)
    begins = {(size, method): _first(names[0], runs).weights for size, method, names in rows}
    return [
        (size, method, names)
        for size, method, names in rows
        if begins[size, method] is None
        or begins[size, method] != begins.get((size, f"{method}_public"))
    ]


def _first(name: str, runs: Mapping[str, "Run"]) -> "Run":
    """What a run starts from in the end."""
    while (source := runs[name].source) is not None:
        name = source
    return runs[name]


def missing_weights(runs: Mapping[str, "Run"], root: Path) -> list[str]:
    """What a real run would not find: a sentence for each file of weights not imported yet."""
    return [
        f"runs: {name}: no weights at {run.weights}; correct `weights` there or fetch them "
        "(maect retrieve, docs/weights.md)"
        for name, run in runs.items()
        if run.weights is not None
        and not (root / "runs" / name / "run.json").exists()
        and not run.weights.is_file()
    ]
