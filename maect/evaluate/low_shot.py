"""Logistic regression on few labels: some samples per class, or a fraction of them (paper, B).

The setting of DINO and MSN: frozen features, rows centred and scaled to length 1, an L2 penalty,
no intercept.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, Features, Fraction, Input, Protocol
from maect.evaluate.job import Job, idle_cpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.data.labelled import Labelled
    from maect.evaluate.store import FeatureFile


class LowShot(Protocol):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    name: ClassVar[str] = "low_shot"
    title: ClassVar[str] = "logistic regression on few labels"
    minutes: ClassVar[float] = 20.0

    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    fractions: tuple[Fraction, ...] = ()
    """Of the labels, as well: 0.01 and 0.1 in the paper."""
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["lbfgs", "cyanure"] = "lbfgs"
    """Of the same convex problem, in float64; MSN and the paper used cyanure."""
    seed: int = 0
    """Seed of the subsets where no lists are given."""
    subsets: str | None = None
    """Folder of the official lists (`maect retrieve`); none: seeded subsets."""

    @model_validator(mode="after")
    def _asked(self) -> LowShot:
        if not self.shots and not self.fractions:
            raise ValueError("neither shots nor fractions: there is nothing to measure")
        return self

    @property
    def lists(self) -> str | None:
        """Folder of official low-shot lists that is read, if any."""
        return self.subsets

    def inputs(self) -> dict[str, Input]:
        """Features of both splits."""
        return {"train": Features(self.train_split), "test": Features(self.test_split)}

    def evaluate(self, context: Context, job: Job) -> dict[str, Any]:
        """Accuracies in percent: `low_shot_N`, the mean over splits, and each; `low_shot_Npct`.

        Raises:
            UserError: a class with fewer samples than shots, a list that does not fit the split, or
                samples of one class only.
        """
        import numpy as np

        from maect.data.labelled import fraction_name, fraction_rows_of
        from maect.evaluate import logistic

        train, test = job.both()
        wanted = [(shots, split) for shots in self.shots for split in range(1, self.splits + 1)]
        subsets: dict[Any, NDArray[np.int64]] = {p: choose(train, *p, self) for p in wanted}
        for fraction in self.fractions:
            subsets[fraction] = fraction_rows_of(labelled(train), fraction, self.seed, self.subsets)
        if any(len(np.unique(train.labels[ids])) < 2 for ids in subsets.values()):
            raise UserError(
                f"{train.path}: low_shot needs at least two classes, and the samples it would "
                "train on are of one; extract features of a split with more"
            )
        queries = logistic.prepare(test.all())

        def accuracy(name: Any) -> tuple[float, bool]:
            ids = subsets[name]
            weights, converged = logistic.fit(
                logistic.prepare(train.take(ids)),
                train.labels[ids],
                train.classes,
                self.l2 / len(ids),
                self.solver,
            )
            hits = int(np.sum(logistic.predict(queries, weights) == test.labels))
            return 100 * hits / test.n, converged

        with warnings.catch_warnings(), ThreadPoolExecutor(idle_cpus(context)) as pool:
            warnings.simplefilter("ignore")  # a solver that gives up is in the JSON
            results = dict(zip(subsets, pool.map(accuracy, subsets), strict=True))
        metrics: dict[str, Any] = {}
        for shots in self.shots:
            scored = [results[shots, split] for split in range(1, self.splits + 1)]
            metrics[f"low_shot_{shots}"] = float(np.mean([accuracy for accuracy, _ in scored]))
            metrics[f"low_shot_{shots}_splits"] = [accuracy for accuracy, _ in scored]
            metrics[f"low_shot_{shots}_converged"] = [converged for _, converged in scored]
        for fraction in self.fractions:
            name = fraction_name(fraction)
            metrics[name], metrics[f"{name}_converged"] = results[fraction]
        return metrics


def choose(train: FeatureFile, shots: int, split: int, settings: LowShot) -> NDArray[np.int64]:
    """Ids of the training samples of one split, sorted: from a list, or drawn by seed.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.
    """
    from maect.data.labelled import shots_rows

    return shots_rows(labelled(train), shots, split, settings.seed, settings.subsets)


def labelled(train: FeatureFile) -> Labelled:
    """A features file as a split to choose samples from."""
    from maect.data.labelled import Labelled

    return Labelled(train.path, train.labels, train.names, train.record["class_names"])
