"""Makes published numbers again, from nothing but the images, and compares them.

A published folder has tables (`tables/NAME.csv`) and checksums of the encoders behind them
(`runs.csv`). The experiment of its name makes both again.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import yaml

from maect.core.errors import UserError, did_you_mean
from maect.core.files import read_json, seek_record, write_text
from maect.core.stamps import STAMP
from maect.core.yaml_files import read_mapping
from maect.experiment import Experiment, load
from maect.records import RunRecord
from maect.report.bounds import ACCURACIES, split_of
from maect.report.configs import Row
from maect.report.registry import TABLES, Metric
from maect.report.tables import DECIMALS, build_table, read_table

DRAWN = 10
"""Cells where none is named."""
DEVIATIONS = 2.5
IMAGES = 3
"""Predictions that rounding may turn, of the same encoder on another machine."""


@dataclass(frozen=True)
class Checked:
    """A number of a table: `TABLE.METHOD.METRIC`, of one architecture."""

    table: str
    row: Row
    metric: Metric
    value: float
    std: float

    @property
    def name(self) -> str:
        """Return how the command names it."""
        return f"{self.table}.{self.row.method}.{self.metric.name}"

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Return the evaluations that it rests on, as (run, evaluation)."""
        names = TABLES[self.table].evaluations_of(self.metric, self.row.method)
        return [(run, name) for run in self.row.runs for name in names]


def cells(published: Path, experiment: Experiment) -> list[Checked]:
    """Return every number of the published tables that the experiment's runs make.

    Where seeds are still missing, a number is that of the seeds whose results are published.
    """
    found = []
    results = read_json(published / "evaluations.json", {}).get("results", {})
    there = {tuple(name.split("/")) for name in results}
    for path in sorted(published.glob("tables/*.csv")):
        table = TABLES.get(path.stem)
        if table is None or path.stem not in experiment.spec.tables | experiment.spec.figures:
            continue
        frame = read_table(path).set_index(["architecture", "method"])
        metrics = [one for one in table.metrics if not one.by_model and one.name in frame]
        metrics += filter(
            None, map(table.other, map(str, frame.filter(regex="(?<!_std)(?<!_paper)$")))
        )
        for row in experiment.rows(path.stem):
            for metric in metrics:
                if (row.architecture, row.method) not in frame.index:
                    continue
                at = row.architecture, row.method
                value, std = (float(frame[f"{metric.name}{part}"][at]) for part in ("", "_std"))
                names = table.evaluations_of(metric, row.method)
                seeds = tuple(run for run in row.runs if any((run, n) in there for n in names))
                cell = Checked(path.stem, replace(row, runs=seeds or row.runs), metric, value, std)
                if not math.isnan(value) and any(e in experiment.evaluations for e in cell.asked):
                    found.append(cell)
    return found


def chosen(
    found: Sequence[Checked], names: Sequence[str], seed: int | None = None
) -> list[Checked]:
    """Return the cells of these names, or random ones; UserError for an unknown name."""
    known: dict[str, list[Checked]] = {}
    for cell in found:
        known.setdefault(cell.name, []).append(cell)  # one of each architecture
    for name in names:
        if name not in known:
            raise UserError(
                f"{name}: no such cell (TABLE.METHOD.METRIC); {did_you_mean(name, known)}"
            )
    if names:
        return [cell for name in dict.fromkeys(names) for cell in known[name]]
    return random.Random(seed).sample(list(found), min(DRAWN, len(found)))


def tolerance(cell: Checked, same: bool, images: int) -> tuple[float, str]:
    """Return the tolerance of a number, in its own unit, and its reason.

    It depends on whether the encoders have the published bits (`same`), on the images measured on,
    and on whether the number is an accuracy: of others only seeds say how much they vary.
    """
    accuracy = cell.table in ACCURACIES
    if same and accuracy:
        return 100 * IMAGES / images, f"{IMAGES} of {images:,} predictions, the same encoder"
    if cell.std > 0:  # equal seeds say nothing of others
        return DEVIATIONS * cell.std, f"{DEVIATIONS} standard deviations over seeds"
    if not accuracy:
        return math.inf, "not judged: no accuracy, and no deviation over seeds"
    share = (cell.value * images / 100 + 1) / (images + 2)  # not 0 or 1, which have no error
    error = 100 * math.sqrt(2 * share * (1 - share) / images)
    return DEVIATIONS * error, f"{DEVIATIONS} binomial errors of {images:,} images"


def verify(
    published: Path,
    names: Sequence[str],
    out: Path,
    run: Callable[[Path, list[str]], int],
    seed: int | None = None,
) -> int:
    """Make cells of a published folder again and print how each compares; returns a status.

    Args:
        out: folder of what is made; what is there already is not made again.
        run: runs the pipeline on an experiment's file and targets; returns its status.

    Raises:
        UserError: not such a folder, no such cell, or an experiment of this name in `out`.
    """
    runs = published / "runs.csv"
    if not runs.exists():
        raise UserError(f"{published}: no published results (runs.csv); try docs/results/digits")
    before = load(published.resolve().name)
    spec = yaml.safe_load(before.file.read_text(encoding="utf-8"))
    file = out / f"{before.name}.yaml"
    again = out / before.name
    if file.exists() and read_mapping(file, "experiment").get("storage") != str(again):
        raise UserError(f"{file}: an experiment of yours; choose another --out")
    write_text(file, yaml.safe_dump(spec | {"storage": str(again)}, sort_keys=False))
    experiment = load(str(file))
    asked = chosen(cells(published, experiment), names, seed)
    if not asked:
        raise UserError(f"{published}: no number that the experiment {before.name} makes (tables/)")
    files = {
        str(again / "evaluations" / pair[0] / f"{pair[1]}.{STAMP}")
        for cell in asked
        for pair in cell.asked
        if pair in experiment.evaluations
    }
    print(f"{len(asked)} cells by {len(files)} evaluations, below {again}", flush=True)
    if status := run(file, sorted(files)):
        return status
    known = pd.read_csv(runs, index_col="run", keep_default_na=False)["encoder_sha256"]
    outside = open_ = 0
    several = len({cell.row.architecture for cell in asked}) > 1
    for cell in asked:
        frame = build_table(cell.table, [cell.row], again / "evaluations", paper=False)
        value = float(frame[cell.metric.name].iloc[0])
        made = [RunRecord.find(again / "runs" / one) for one in cell.row.runs]
        sums = [one and one.encoder_sha256 for one in made]
        same = sums == [str(known.get(one, "")) for one in cell.row.runs]
        split = split_of(cell.table, cell.metric.name)
        index = experiment.shards(experiment.default_dataset, split) / "index.json"
        most, why = tolerance(cell, same, int(seek_record(index).get("n", 1)))
        difference = round(value - cell.value, DECIMALS)
        allowed = why if math.isinf(most) else f"at most {most:.2g} ({why})"
        verdict = "same" if difference == 0 else f"{difference:+.4g}, {allowed}"
        inside = abs(difference) <= most
        if not inside:
            outside += 1
        if difference != 0 and math.isinf(most):
            open_ += 1
        bits = "the same bits" if same else "another encoder"
        mark = "" if inside else "  OUTSIDE"
        name = f"{cell.name} of {cell.row.architecture}" if several else cell.name
        print(f"{name}: {cell.value:g} published, {value:g} now: {verdict}; {bits}{mark}")
    left = f", {open_} not judged" if open_ else ""
    print(f"{len(asked) - outside - open_} of {len(asked)} cells agree{left}")
    return min(outside, 1)
