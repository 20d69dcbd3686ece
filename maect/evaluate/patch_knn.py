"""k-nearest neighbours of patches, for segmentation, in the settings of CAPI.

Every test patch takes from its k nearest training patches the most frequent class of each pixel.
k and distance are those of the highest mIoU on held-out training images, which are then added to
the training patches. Features are standardised by the patches that are not held out.

Compared with CAPI's code (facebookresearch/capi, eval_segmentation.py):

| | there | here |
| --- | --- | --- |
| images | 224 x 224 pixels, squeezed, bicubic; masks nearest | the encoder's size, else the same |
| features | patch tokens of the last block behind the final norm, StandardScaler | the same |
| choice | k 1, 3, 10, 30 with cosine or L2, by mIoU on 10 % of the training images | the same |
| left out | patches whose most frequent number is 0 or 255, pixels likewise | the same (`ignore`) |
| precision | float32 | the same |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, EvaluationJob, idle_cpus
from maect.evaluate.dense import PatchClassifier, best_setting, miou

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array

_AT_ONCE = 4096


class PatchKnn(PatchClassifier):
    """Segmentation by the nearest training patches."""

    name: ClassVar[str] = "patch_knn"
    title: ClassVar[str] = "k-nearest neighbours of patches"
    minutes: ClassVar[float] = 30.0

    neighbours: tuple[Count, ...] = (1, 3, 10, 30)
    distances: tuple[Literal["cosine", "l2"], ...] = ("cosine", "l2")

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """mIoU in percent as `patch_knn`, with accuracy, IoU of each class, and what was chosen.

        Raises:
            UserError: masks that do not fit the images, or fewer patches than neighbours.
        """
        parts = self.patches(context, job)
        if parts is None:
            return {}
        threads = idle_cpus(context)
        train, held, test = parts["train"], parts["held"], parts["test"]
        base = self.learnt(train)
        if len(base[0]) < max(self.neighbours):
            raise UserError(
                f"{job.path('train')}: {len(base[0])} patches, fewer than {max(self.neighbours)} "
                "neighbours; give more images or fewer `neighbours`"
            )
        voted = {d: self.votes(*base, held.rows(), d, threads) for d in self.distances}
        settings = [{"k": k, "distance": d} for d in self.distances for k in self.neighbours]

        def score(setting: dict[str, Any]) -> float:
            predicted = voted[setting["distance"]][setting["k"]]
            return miou(held.pixels(), predicted, self.ignore)[0]

        chosen, tried = best_setting(settings, score)
        predicted = self.votes(*self.learnt(train, held), test.rows(), chosen["distance"], threads)
        return self.score(self.name, predicted[chosen["k"]], test) | chosen | {"held_out": tried}

    def votes(
        self,
        features: Array,
        classes: NDArray[np.uint8],
        queries: Array,
        distance: Literal["cosine", "l2"],
        threads: int,
    ) -> dict[int, NDArray[np.uint8]]:
        """The most frequent class of each pixel among k neighbours, of several the smallest.

        Args:
            features: of training patches, float32 [n, D].
            classes: of their pixels, uint8 [n, p].
            queries: float32 [q, D].
            distance: see `nearest`.
            threads: cores to use.

        Returns:
            uint8 [q, p] for each k.
        """
        import numpy as np
        import torch

        from maect.evaluate.knn import nearest
        from maect.evaluate.store import InMemory

        _, ids = nearest(InMemory(features), queries, max(self.neighbours), None, threads, distance)
        known = torch.from_numpy(classes)
        out = {k: np.empty((len(queries), classes.shape[1]), np.uint8) for k in self.neighbours}
        for start in range(0, len(ids), _AT_ONCE):
            found = known[torch.from_numpy(ids[start : start + _AT_ONCE])]  # [b, k, p]
            for k, values in out.items():
                values[start : start + _AT_ONCE] = found[:, :k].mode(dim=1).values.numpy()
        return out
