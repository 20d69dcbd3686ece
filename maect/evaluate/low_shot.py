"""Logistic regression on few labels: some samples per class, or a fraction of them (paper, B).

The setting of DINO and MSN: frozen features, rows centred and scaled to length 1, an L2 penalty,
no intercept.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.data.labelled import Labelled, fraction_name, fraction_rows_of, shots_rows
from maect.evaluate import logistic
from maect.evaluate.job import Context, Job, idle_cpus
from maect.evaluate.protocols import LowShot
from maect.evaluate.store import Features

INPUTS = ("train", "test")


def evaluate(context: Context, job: Job, settings: LowShot) -> dict[str, Any]:
    """Accuracies in percent: `low_shot_N`, the mean over splits, and each of them; `low_shot_Npct`.

    Raises:
        UserError: a class with fewer samples than shots, a list that does not fit the split, or
            samples of one class only.
    """
    train, test = job.both()
    wanted = [(shots, split) for shots in settings.shots for split in range(1, settings.splits + 1)]
    subsets: dict[Any, NDArray[np.int64]] = {p: choose(train, *p, settings) for p in wanted}
    for fraction in settings.fractions:
        subsets[fraction] = fraction_rows_of(
            labelled(train), fraction, settings.seed, settings.subsets
        )
    if any(len(np.unique(train.labels[ids])) < 2 for ids in subsets.values()):
        raise UserError(
            f"{train.path}: low_shot needs at least two classes, and the samples it would train "
            "on are of one; extract features of a split with more"
        )
    queries = logistic.prepare(test.all())

    def accuracy(name: Any) -> tuple[float, bool]:
        ids = subsets[name]
        weights, converged = logistic.fit(
            logistic.prepare(train.take(ids)),
            train.labels[ids],
            train.classes,
            settings.l2 / len(ids),
            settings.solver,
        )
        hits = int(np.sum(logistic.predict(queries, weights) == test.labels))
        return 100 * hits / test.n, converged

    with warnings.catch_warnings(), ThreadPoolExecutor(idle_cpus(context)) as pool:
        warnings.simplefilter("ignore")  # a solver that gives up is in the JSON
        results = dict(zip(subsets, pool.map(accuracy, subsets), strict=True))
    metrics: dict[str, Any] = {}
    for shots in settings.shots:
        found = [results[shots, split] for split in range(1, settings.splits + 1)]
        metrics[f"low_shot_{shots}"] = float(np.mean([accuracy for accuracy, _ in found]))
        metrics[f"low_shot_{shots}_splits"] = [accuracy for accuracy, _ in found]
        metrics[f"low_shot_{shots}_converged"] = [converged for _, converged in found]
    for fraction in settings.fractions:
        name = fraction_name(fraction)
        metrics[name], metrics[f"{name}_converged"] = results[fraction]
    return metrics


def choose(train: Features, shots: int, split: int, settings: LowShot) -> NDArray[np.int64]:
    """Ids of the training samples of one split, sorted: from a list, or drawn by seed.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.
    """
    return shots_rows(labelled(train), shots, split, settings.seed, settings.subsets)


def labelled(train: Features) -> Labelled:
    """A features file as a split to choose samples from."""
    return Labelled(train.path, train.labels, train.names, train.record["class_names"])
