"""Two-dimensional UMAP embedding of the test features (paper, figures 6 and 8).

The authors published no code for it: umap-learn's defaults, with a fixed seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, ReadsFeatures
from maect.evaluate.clustering import members

if TYPE_CHECKING:
    from maect.evaluate.store import Array

_NUMBA = Path(".numba_config.yaml")


def embedded(rows: Array, neighbors: int, seed: int, **options: Any) -> Array:
    """Embed rows [n, width] as points [n, 2] by UMAP, with `options` of umap-learn.

    Refused, by a UserError, if a file of the working folder would configure UMAP's compiler.
    """
    import numpy as np

    if os.path.lexists(_NUMBA):
        raise UserError(f"{_NUMBA.absolute()}: Numba would be configured by it; move it away")
    from umap import UMAP

    # With more jobs, the layout would not be reproducible.
    found = UMAP(n_neighbors=neighbors, random_state=seed, n_jobs=1, **options).fit_transform(rows)
    return found.astype(np.float32)


class Umap(ReadsFeatures):
    """Two-dimensional UMAP embedding of the test split (paper, figures 6 and 8)."""

    name: ClassVar[str] = "umap"
    title: ClassVar[str] = "UMAP embedding"
    labelled: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 25.0  # to load UMAP's compiled code
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "the embedding is fitted to the test split's features; labels only choose the classes"
    )
    headlines: ClassVar[dict[str, str]] = {}  # it is a picture
    reads: ClassVar[tuple[str, ...]] = ("test",)

    neighbors: int = Field(default=15, gt=1)
    min_dist: float = Field(default=0.1, ge=0)
    metric: Literal["euclidean", "cosine"] = "euclidean"
    classes: tuple[str, ...] = ()
    """Names of the classes to show; empty: all."""
    seed: int = 0

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Write `umap.safetensors`: `points` float32 [n, 2], `labels` and `ids` int64 [n]."""
        import numpy as np

        test = job.features("test", labelled=False)
        ids = members(test, self.classes, "classes") if self.classes else np.arange(test.n)
        if len(ids) <= self.neighbors:
            raise UserError(
                f"umap: neighbors {self.neighbors} needs more than the {len(ids)} samples "
                f"of {test.path}"
            )
        options = {"min_dist": self.min_dist, "metric": self.metric}
        points = embedded(test.take(ids), self.neighbors, self.seed, **options)
        job.write_tensors({"points": points, "labels": test.labels[ids], "ids": ids})
        return {"samples": len(ids)}
