"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`) and standardised with the train set's mean and
standard deviation (`knn_standardized`, what the authors' logger does).
"""

from typing import Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, Features, Input, Positive, Protocol
from maect.evaluate.job import Job, idle_cpus


class Knn(Protocol):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "k-nearest neighbours"
    test_data: ClassVar[str | None] = (
        "knn_best and knn_standardized_best choose k and T on the test split; knn does not"
    )

    k: int = Field(default=10, gt=0)
    temperature: float = Field(default=0.07, gt=0)
    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)

    def inputs(self) -> dict[str, Input]:
        """Features of both splits."""
        return {"train": Features(self.train_split), "test": Features(self.test_split)}

    def evaluate(self, context: Context, job: Job) -> dict[str, Any]:
        """Metrics in percent: `knn`, `knn_standardized`, and the whole sweep over k and T.

        `knn_best` and `knn_standardized_best` choose k and T on the test split, as the paper does
        for other methods' checkpoints that report no k-NN accuracy.

        Raises:
            UserError: fewer training samples than k.
        """
        import numpy as np

        from maect.evaluate.neighbors import nearest, vote
        from maect.evaluate.standardize import moments

        train, test = job.both()
        if self.k > train.n:
            raise UserError(f"knn: k {self.k} is more than the {train.n} samples of {train.path}")
        counts = sorted({self.k, *(k for k in self.sweep if k <= train.n)})
        temperatures = sorted({self.temperature, *self.temperatures})
        metrics: dict[str, Any] = {}
        sweep = []
        for name, standardized in (("knn", False), ("knn_standardized", True)):
            scale = moments(train.rows, train.n, train.width) if standardized else None
            similarity, ids = nearest(train, test.all(), max(counts), scale, idle_cpus(context))
            for k in counts:
                for temperature in temperatures:
                    votes = vote(similarity[:, :k], train.labels[ids[:, :k]], temperature)
                    accuracy = 100 * int(np.sum(votes == test.labels)) / test.n
                    sweep.append(
                        {
                            "k": k,
                            "temperature": temperature,
                            "standardized": standardized,
                            "accuracy": accuracy,
                        }
                    )
                    if (k, temperature) == (self.k, self.temperature):
                        metrics[name] = accuracy
            chosen = [row for row in sweep if row["standardized"] == standardized]
            metrics[f"{name}_best"] = max(row["accuracy"] for row in chosen)
        return {**metrics, "sweep": sweep}
