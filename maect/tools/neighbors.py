"""Check of the neighbours: are they good enough to add anything to crops and flips?

A tuned encoder gets its positives from a lookup, which is as good as the features that look. Where
most lookups are of another class, tuning with it is no better than without: what is gained comes
from the views, and changed colours gain more (`docs/results/what_helps.md`).
Labels are read for this number alone.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maect.core.entries import entries
from maect.core.seeds import seedless
from maect.evaluate.base import Features
from maect.evaluate.store import moments, open_features, standardize
from maect.experiment import Experiment
from maect.experiment.expand import begins_with
from maect.experiment.resolve import features_file
from maect.records import RunRecord, is_finished
from maect.stages.tune import Tune

LEAST = 40.0
"""Percent of right lookups below which the lookup adds nothing that was measured."""
TAIL = 1 << 20  # bytes at the end of a log
LAST = 10  # entries of a log that are averaged
QUERIES, BANK = 1000, 50_000  # training images of a features file that are compared
LARGEST = 1 << 30  # bytes of a features file that is read for this


@dataclass(frozen=True)
class Measured:
    """Share of neighbours of the right class: percent, and the source for people."""

    percent: float
    source: str


def warnings(experiment: Experiment) -> list[str]:
    """Warn of each planned tuning with crops and flips alone that has bad neighbours."""
    found = dict[str, Measured]()
    for name, run in experiment.runs.items():
        tuned = run.settings
        if not isinstance(tuned, Tune) or tuned.augmentation != "min" or tuned.from_scratch:
            continue
        if tuned.head.lookup != "topk" or is_finished(experiment.folder(name)):
            continue
        if (one := measured(experiment, name)) is not None and one.percent < LEAST:
            found.setdefault(seedless(name), one)
    return [
        f"{name}: {one.percent:.0f} % of its neighbours are of the right class ({one.source}): "
        f"below {LEAST:.0f} % neighbours are unlikely to add anything, and the views decide; "
        "take the recipe ct_aug, which changes colours, or train the MAE longer"
        for name, one in found.items()
    ]


def measured(experiment: Experiment, name: str) -> Measured | None:
    """Return the known precision of a tuned run's neighbours.

    Its own lookups and those of the head that it starts from come first, then features of its
    MAE's or a public encoder's training images, then the last online evaluation of its MAE.
    """
    own = experiment.runs[name]
    for run in filter(None, (name, own.source)):
        if (percent := _logged(experiment.folder(run), "lookup_accuracy", LAST)) is not None:
            return Measured(percent, f"lookups of {run}")
    first = begins_with(name, experiment.runs).name
    features = features_file(experiment, first, own.dataset, Features(own.split))
    if features.exists() and (percent := nearest(features)) is not None:
        return Measured(percent, f"features of {first}")
    if (percent := _logged(experiment.folder(first), "online_neighbors", 1)) is not None:
        return Measured(percent, f"online evaluation of {first}")
    return None


def _logged(folder: Path, key: str, last: int) -> float | None:
    """Return the mean of the last values of a run's log; None without values, as without labels."""
    record = RunRecord.find(folder)
    epochs = record.logged_epochs if record else None
    values = [e[key] for e in entries(folder / "metrics.jsonl", TAIL, epochs) if key in e]
    return float(np.mean(values[-last:])) if values else None


def nearest(path: Path) -> float | None:
    """Return the percentage of training images whose nearest other image has their class.

    None where labels are not known, or the file is too large for a quick answer.
    """
    if path.stat().st_size > LARGEST:
        return None
    file = open_features(path)
    ids = np.unique(np.linspace(0, file.n - 1, min(file.n, BANK)).astype(np.int64))
    labels = file.labels[ids]
    if labels.min() < 0 or len(ids) < 2:
        return None
    rows = standardize(file.take(ids), moments(file))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    queries = np.unique(np.linspace(0, len(ids) - 1, min(len(ids), QUERIES)).astype(np.int64))
    similarity = rows[queries] @ rows.T
    similarity[np.arange(len(queries)), queries] = -2
    return 100 * float((labels[similarity.argmax(axis=1)] == labels[queries]).mean())
