"""What an experiment shows: the resolved file of every table and figure, and what each reads."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from maect.core.settings_file import SettingsFile
from maect.experiment.load import Experiment
from maect.report.config import ClaimsConfig, ShownConfig
from maect.report.registry import FIGURES, TABLES, Figure, Table, can_show


def figures(experiment: Experiment) -> list[str]:
    """The figures that have anything to show, where less is evaluated than the file asks for."""
    return [name for name in experiment.figures if _can_show(experiment, name, figure=True)]


def tables(experiment: Experiment) -> list[str]:
    """Likewise the tables; one of a figure's name has the numbers behind it, for the claims."""
    names = [name for name in experiment.tables if _can_show(experiment, name, figure=False)]
    return [*names, *(name for name in figures(experiment) if name in TABLES)]


def _can_show(experiment: Experiment, name: str, figure: bool) -> bool:
    rows = experiment.rows(name)
    return not experiment.partial or can_show(name, figure, rows, experiment.asked)


def shown_config(experiment: Experiment, name: str, figure: bool) -> ShownConfig:
    """All that a table or figure is told."""
    return ShownConfig(
        name=name,
        rows=experiment.rows(name),
        evaluations=experiment.root / "evaluations",
        runs=experiment.root / "runs",
        compare_with_paper=experiment.spec.compare_with_paper,
        classes=_classes(experiment, name) if figure else None,
    )


def claims_config(experiment: Experiment) -> ClaimsConfig:
    """All that the claims are told."""
    names = tables(experiment)
    rows = dict.fromkeys(row for name in names for row in experiment.rows(name))
    return ClaimsConfig(
        tables=[experiment.root / "tables" / f"{name}.csv" for name in names],
        rows=list(rows),
        runs=experiment.root / "runs",
    )


def read_by(experiment: Experiment, name: str, figure: bool) -> list[Path]:
    """Files that a table or figure reads, of those that the experiment makes."""
    files = [
        experiment.root / "evaluations" / run / f"{evaluation}.json"
        for run, evaluation in _evaluations(
            experiment, name, TABLES[name] if not figure else FIGURES[name]
        )
    ]
    if figure and FIGURES[name].reads_runs:
        files += records(experiment, [name])
    if figure and (classes := _classes(experiment, name)):
        files.append(classes)
    return files


def records(experiment: Experiment, names: list[str]) -> list[Path]:
    """Completion records of the runs in tables and figures and of all that they start from."""
    runs = [run for name in names for row in experiment.rows(name) for run in row.runs]
    return [experiment.folder(run) / "run.json" for run in experiment.behind(runs)]


def _evaluations(
    experiment: Experiment, name: str, shown: Table | Figure
) -> Iterator[tuple[str, str]]:
    """Those that a table or figure reads and the experiment makes, as (run, name)."""
    for row in experiment.rows(name):
        for pair in itertools.product(row.runs, shown.reads(row.method)):
            if pair in experiment.asked:
                yield pair


def _classes(experiment: Experiment, name: str) -> Path | None:
    """The index that names the classes a figure shows, if it shows any."""
    shown = FIGURES[name]
    for pair in _evaluations(experiment, name, shown) if shown.names_classes else ():
        split = experiment.evaluation(*pair).test_split
        return experiment.shards(experiment.default_dataset, split) / "index.json"
    return None


def files(experiment: Experiment) -> Iterator[tuple[Path, SettingsFile]]:
    """The resolved file of every table and figure and of the claims, and where it is."""
    for figure, kind, names in (
        (False, "tables", tables(experiment)),
        (True, "figures", figures(experiment)),
    ):
        for name in names:
            path = experiment.root / kind / f"{name}.yaml"
            yield path, shown_config(experiment, name, figure)
    yield experiment.root / "claims.yaml", claims_config(experiment)
