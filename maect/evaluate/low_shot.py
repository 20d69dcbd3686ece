"""Logistic regression on 1, 2 and 5 labelled samples per class, mean of three splits (paper, B).

The setting of DINO and MSN: frozen features, rows centred and scaled to length 1, an L2 penalty,
no intercept, cyanure's solver.
"""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.data.subsets import balanced_rows, read_list
from maect.errors import UserError
from maect.evaluate import logistic
from maect.evaluate.job import Context, Job, idle_cpus
from maect.evaluate.store import Features
from maect.recipes.protocols import LowShot

INPUTS = ("train", "test")
LIST_NAME = "msn_{shots}shot_split{split}.txt"


def evaluate(context: Context, job: Job, settings: LowShot) -> dict[str, Any]:
    """Accuracies in percent: `low_shot_N`, the mean over splits, and each of them.

    Raises:
        UserError: a class with fewer samples than shots, or a list that does not fit the split.
    """
    train, test = job.both()
    wanted = [(shots, split) for shots in settings.shots for split in range(1, settings.splits + 1)]
    subsets = {pair: choose(train, *pair, settings) for pair in wanted}
    queries = logistic.prepare(test.all())

    def accuracy(pair: tuple[int, int]) -> tuple[float, bool]:
        ids = subsets[pair]
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
        results = dict(zip(wanted, pool.map(accuracy, wanted), strict=True))
    metrics: dict[str, Any] = {}
    for shots in settings.shots:
        found = [results[shots, split] for split in range(1, settings.splits + 1)]
        metrics[f"low_shot_{shots}"] = float(np.mean([accuracy for accuracy, _ in found]))
        metrics[f"low_shot_{shots}_splits"] = [accuracy for accuracy, _ in found]
        metrics[f"low_shot_{shots}_converged"] = [converged for _, converged in found]
    return metrics


def choose(train: Features, shots: int, split: int, settings: LowShot) -> NDArray[np.int64]:
    """Ids of the training samples of one split, sorted: from a list, or drawn by seed.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.
    """
    if settings.subsets is not None:
        folder = Path(os.path.expandvars(settings.subsets)).expanduser()
        return listed(train, folder / LIST_NAME.format(shots=shots, split=split))
    try:
        return balanced_rows(train.labels, shots, (settings.seed << 16) + split)
    except UserError as error:
        raise UserError(f"{train.path}: {error}") from None


def listed(train: Features, path: Path) -> NDArray[np.int64]:
    """Ids of the samples whose file names a list holds, sorted.

    Raises:
        UserError: no such list, or a name that the train split lacks or has twice.
    """
    # A key in a tar has no extension and no dot (see `maect.data.plan`).
    stems = {
        name.rpartition("/")[2].rpartition(".")[0].replace(".", "_") for name in read_list(path)
    }
    known = [name.rpartition("/")[2] for name in train.names()]
    ids = np.array([i for i, name in enumerate(known) if name in stems], np.int64)
    if len(ids) != len(stems):
        missing = sorted(stems - set(known))
        what = f"lacks {missing[0]}" if missing else "has a listed name twice"
        raise UserError(f"{path}: {len(stems)} names, but {train.path} {what}")
    return ids
