"""k-means on the test features against the labels (paper, E).

Standardised features, mini-batch k-means from many seeds; the run of lowest inertia is reported,
and the mean and standard deviation of all runs. Labels are used for the score only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.files import atomic_write
from maect.evaluate.base import Features, Input, Protocol
from maect.evaluate.job import Job, idle_cpus

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Clustering(Protocol):
    """k-means on the test split (paper, E): `runs` seeds, best by inertia and mean."""

    name: ClassVar[str] = "clustering"
    title: ClassVar[str] = "k-means"
    leaves: ClassVar[bool] = True
    minutes: ClassVar[float] = 30.0
    test_data: ClassVar[str | None] = (
        "standardised with the test split's own mean and deviation, as the paper does"
    )

    runs: int = Field(default=100, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    n_init: int = Field(default=3, gt=0)
    max_iter: int = Field(default=100, gt=0)
    subsets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further clusterings of some classes only: a name for the metrics and the class names."""

    def inputs(self) -> dict[str, Input]:
        """Features of the test split."""
        return {"test": Features(self.test_split)}

    def evaluate(self, context: Context, job: Job) -> dict[str, Any]:
        """Scores in percent, of the best run and over all, and the silhouette of the true classes.

        Metrics of a class subset carry its name as a prefix. Beside the JSON,
        `clustering.safetensors` keeps clusters, centres (standardised) and confusion matrix of each
        best run, and its `origin`.

        Raises:
            UserError: fewer than two classes, no class of two samples, or fewer distinct samples
                than classes.
        """
        import numpy as np
        from safetensors.numpy import save_file

        from maect.evaluate.kmeans import check, cluster, members, origin

        test = job.features("test")
        metrics: dict[str, Any] = {}
        tensors: dict[str, NDArray[Any]] = {}
        parts = {"": np.arange(test.n)}
        for name, classes in self.subsets.items():
            parts[f"{name}_"] = members(test, classes, name)
        for ids in parts.values():
            check(test, ids)
        for prefix, ids in parts.items():
            scores, arrays = cluster(test, ids, self, idle_cpus(context))
            metrics |= {prefix + key: value for key, value in scores.items()}
            tensors |= {prefix + key: value for key, value in arrays.items()}
        with atomic_write(job.out.with_suffix(".safetensors")) as temporary:
            save_file(tensors, temporary, {"maect": json.dumps(origin(test))})
        return metrics
