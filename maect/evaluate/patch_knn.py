"""k-nearest neighbours of patches, for segmentation, in the settings of CAPI.

Every test patch takes from its k nearest training patches the most frequent class of each pixel.
k and distance are those of the highest mIoU on held-out training images, which are then added to
the training patches. Features are standardised by the patches that are not held out.
docs/reference/authors_code.md compares each setting with CAPI's eval_segmentation.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maect.core.errors import UserError
from maect.evaluate.base import Count
from maect.evaluate.dense import Known, PatchClassifier
from maect.evaluate.knn import nearest

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

    def settings(self) -> list[dict[str, Any]]:
        """Every number of neighbours by every distance."""
        return [{"k": k, "distance": d} for d in self.distances for k in self.neighbours]

    def predicted(
        self, known: Known, queries: Array, settings: list[dict[str, Any]], threads: int
    ) -> list[NDArray[np.uint8]]:
        """The most frequent class of each pixel among k neighbours, of several the smallest."""
        import numpy as np
        import torch

        from maect.evaluate.store import in_memory

        features, classes = known
        table, most = torch.from_numpy(classes), max(self.neighbours)
        if len(features) < most:
            raise UserError(
                f"{self.train_split}: {len(features)} patches, fewer than {most} neighbours; give "
                "more images or fewer `neighbours`"
            )
        out = [np.empty((len(queries), classes.shape[1]), np.uint8) for _ in settings]
        for distance in dict.fromkeys(setting["distance"] for setting in settings):
            _, ids = nearest(in_memory(features), queries, most, None, threads, distance)
            for start in range(0, len(ids), _AT_ONCE):
                found = table[torch.from_numpy(ids[start : start + _AT_ONCE])]  # [b, k, p]
                for setting, votes in zip(settings, out, strict=True):
                    if setting["distance"] == distance:
                        mode = found[:, : setting["k"]].mode(dim=1).values
                        votes[start : start + _AT_ONCE] = mode.numpy()
        return out
