"""Two-dimensional UMAP embedding of the test features (paper, figures 6 and 8).

The authors published no code for it: umap-learn's defaults, with a fixed seed.
"""

from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.evaluate.clustering import members
from maect.evaluate.job import Context, Job
from maect.evaluate.protocols import Umap

INPUTS = ("test",)
TEST_DATA = "the embedding is fitted to the test split's features; labels only choose the classes"


def evaluate(context: Context, job: Job, settings: Umap) -> dict[str, Any]:
    """Write `umap.safetensors`: `points` float32 [n, 2], `labels` and `ids` int64 [n].

    Raises:
        UserError: not more samples than neighbours.
    """
    from safetensors.numpy import save_file

    test = job.features("test", labelled=False)
    ids = members(test, settings.classes, "classes") if settings.classes else np.arange(test.n)
    if len(ids) <= settings.neighbors:
        raise UserError(
            f"umap: neighbors {settings.neighbors} needs more than the {len(ids)} samples "
            f"of {test.path}"
        )
    from umap import UMAP

    points = UMAP(
        n_components=2,
        n_neighbors=settings.neighbors,
        min_dist=settings.min_dist,
        metric=settings.metric,
        random_state=settings.seed,
        n_jobs=1,  # with more, the layout would not be reproducible
    ).fit_transform(test.take(ids))
    with atomic_write(job.out.with_suffix(".safetensors")) as temporary:
        save_file(
            {
                "points": np.ascontiguousarray(points, np.float32),
                "labels": test.labels[ids],
                "ids": ids,
            },
            temporary,
        )
    return {"samples": len(ids)}
