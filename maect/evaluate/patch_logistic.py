"""Logistic regression on patches, for segmentation, in the settings of CAPI.

A patch is of the most frequent class of its pixels. Its penalty is that of the highest mIoU on
held-out training images, which are then added. Images, features and what is left out: `patch_knn`.

Compared with CAPI's code (facebookresearch/capi, eval_segmentation.py):

| | there | here |
| --- | --- | --- |
| solver | cuML's L-BFGS, memory 5, float32 | scikit-learn's L-BFGS, memory 10, float64 |
| end | 1,000 iterations or a gradient below 1e-12 | the same: the iterations |
| C | eight from 1e-6 to 1e5, chosen by mIoU on 10 % of the training images | the same |
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, EvaluationJob, Positive, idle_cpus
from maect.evaluate.dense import PatchClassifier, best_setting, miou, most_frequent
from maect.evaluate.logistic import PENALTIES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.dense import Patches
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

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """mIoU in percent as `patch_logistic`, with accuracy, IoU of each class, and C.

        Raises:
            UserError: masks that do not fit the images, or of one class only.
        """
        import numpy as np
        from threadpoolctl import threadpool_limits

        parts = self.patches(context, job)
        if parts is None:
            return {}
        train, held, test = parts["train"], parts["held"], parts["test"]
        base = self.learnt(train)
        if len(np.unique(most_frequent(base[1]))) < 2:
            raise UserError(f"{job.path('train_masks')}: patches of one class only")
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a weak penalty may not converge, nor need to
            with ThreadPoolExecutor(idle_cpus(context)) as pool:
                fits = pool.map(lambda c: self.predicted(*base, held, c), self.penalties)
                found = dict(zip(self.penalties, fits, strict=True))
            chosen, tried = best_setting(
                [{"c": c} for c in self.penalties],
                lambda setting: miou(held.pixels(), found[setting["c"]], self.ignore)[0],
            )
            predicted = self.predicted(*self.learnt(train, held), test, chosen["c"])
        return self.score(self.name, predicted, test) | chosen | {"held_out": tried}

    def predicted(
        self, features: Array, classes: NDArray[np.uint8], patches: Patches, c: float
    ) -> NDArray[np.uint8]:
        """Fit to patches [n, D] with pixels [n, p]; the class of others' pixels, [m, p]."""
        import numpy as np
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(C=c, max_iter=self.max_iterations, tol=self.tolerance)
        model.fit(features.astype(np.float64), most_frequent(classes))
        labels = model.predict(patches.rows().astype(np.float64)).astype(np.uint8)
        return np.broadcast_to(labels[:, None], patches.pixels().shape)
