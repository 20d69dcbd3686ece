"""Logistic regression on patches, for segmentation, in the settings of CAPI.

A patch is of the most frequent class of its pixels. Its penalty is that of the highest mIoU on
held-out training images, which are then added. Images, features and what is left out: `patch_knn`.
docs/reference/authors_code.md compares each setting with CAPI's eval_segmentation.py.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from threadpoolctl import threadpool_limits

from maect.core.errors import UserError
from maect.evaluate.base import Count, Positive
from maect.evaluate.dense import Known, PatchClassifier, most_frequent
from maect.evaluate.logistic import PENALTIES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array


class PatchLogistic(PatchClassifier):
    """Segmentation by a logistic regression on patches."""

    name: ClassVar[str] = "patch_logistic"
    title: ClassVar[str] = "logistic regression on patches"
    minutes: ClassVar[float] = 60.0

    penalties: tuple[Positive, ...] = Field(default=PENALTIES, min_length=1)
    """C: weight of the summed loss beside half the squared weights, as scikit-learn writes it."""
    max_iterations: Count = 1000
    tolerance: float = Field(default=1e-12, ge=0)
    """Of the largest component of the gradient."""

    def settings(self) -> list[dict[str, Any]]:
        """Every penalty."""
        return [{"c": c} for c in self.penalties]

    def predicted(
        self, known: Known, queries: Array, settings: list[dict[str, Any]], threads: int
    ) -> list[NDArray[np.uint8]]:
        """The class of a patch for each of its pixels."""
        import numpy as np
        from sklearn.linear_model import LogisticRegression

        features, classes = known
        labels, shape = most_frequent(classes), (len(queries), classes.shape[1])
        if len(np.unique(labels)) < 2:
            raise UserError(f"{self.train_masks}: patches of one class only")

        known_64, queries_64 = features.astype(np.float64), queries.astype(np.float64)

        def fitted(setting: dict[str, Any]) -> NDArray[np.uint8]:
            model = LogisticRegression(
                C=setting["c"], max_iter=self.max_iterations, tol=self.tolerance
            )
            found = model.fit(known_64, labels).predict(queries_64)
            return np.broadcast_to(found.astype(np.uint8)[:, None], shape)

        with threadpool_limits(1), warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
            warnings.simplefilter("ignore")  # a weak penalty may not converge, nor need to
            return list(pool.map(fitted, settings))
