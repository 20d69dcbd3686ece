"""Agreement of the neighbours of two views: a score of each image, without labels.

A score of labels needs classes. Without them an encoder can still be asked whether what it finds
near an image depends on how the image was cropped. Collapsed features agree, too, so that alignment
(Wang and Isola 2020) is reported with uniformity and RankMe (Garrido et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import (
    EvaluationJob,
    Features,
    ImageCount,
    Input,
    Protocol,
    Shards,
    idle_cpus,
)
from maect.recipes import KNN_K, View

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from maect.data.index import Index
    from maect.evaluate.encoding import Encoding

BLOCK = 256
"""Images that are decoded together."""


class Agreement(Protocol):
    """Part of the nearest training images that two views of a test image share."""

    name: ClassVar[str] = "agreement"
    title: ClassVar[str] = "neighbours that two views share"
    labelled: ClassVar[bool] = False
    encoder_input: ClassVar[bool] = True
    headlines: ClassVar[dict[str, str]] = {"agreement": "neighbours that two views share"}

    k: int = Field(default=KNN_K, gt=0)
    """Neighbours of each view."""
    images: int = Field(default=2000, gt=1)
    """Test images, at most, evenly spaced."""
    bank: int = Field(default=20000, gt=0)
    """Training images, at most, evenly spaced, to find neighbours among."""
    crop_scale: tuple[float, float] = (0.25, 1.0)
    """Part of the image that a view shows."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    seed: int = 0
    """Seed of the views, which are the same for every encoder."""

    def inputs(self) -> dict[str, Input]:
        """Features of the training images, and the test images."""
        return {"train": Features(self.train_split), "test": Shards(self.test_split)}

    def encoded(self, images: ImageCount) -> float:
        """Count two views of each test image."""
        return 2 * min(self.images, images(self.test_split))

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """`agreement` in percent, `alignment`, `uniformity` and `rank_me` of the test images.

        Raises:
            UserError: fewer training images than `k`, or fewer than two test images.
        """
        import numpy as np

        from maect.core import distributed
        from maect.data.index import open_index
        from maect.evaluate.encoding import Encoding, check_finite

        train = job.features("train", labelled=False)
        index = open_index(job.path("test"))
        if self.k > train.n or index.n < 2:
            raise UserError(
                f"{job.out.stem}: {train.n} training and {index.n} test images; {self.k} and 2 are "
                "needed"
            )
        bank = train.take(_evenly(train.n, self.bank))
        index = replace(index, rows=index.rows[_evenly(index.n, self.images)])
        encoding = Encoding(job.run / "encoder.safetensors", distributed.device_of(context))
        pairs = self._pairs(context, index, encoding)
        check_finite(pairs, job.run)
        shared = shared_neighbors(pairs, bank, self.k, idle_cpus(context))
        job.notes["test_images"] = index.n
        return {**_spread(pairs), "agreement": 100 * float(np.mean(shared)),
                **job.keep_outcomes({"agreement": shared})}  # fmt: skip

    def _pairs(self, context: Context, index: Index, encoding: Encoding) -> Tensor:
        """Return features of two views of each image, float32 [2, n, D]."""
        import torch

        from maect.data.loader import view_parts
        from maect.data.transforms import augment

        settings = encoding.settings
        view = View(crop_scale=self.crop_scale, flip=self.flip)
        parts = [range(start, min(start + BLOCK, index.n)) for start in range(0, index.n, BLOCK)]
        batches = view_parts(
            index, views=(view, view), image_size=settings.image_size, seed=self.seed,
            parts=parts, threads=idle_cpus(context),
        )  # fmt: skip
        found: list[list[Tensor]] = [[], []]
        for batch in batches:
            for number, features in enumerate(found):
                raw = batch.images[0][number].to(encoding.device)
                given = view, number, self.seed, batch.epochs, batch.ids, settings.pixels
                for images in augment(raw, *given).split(encoding.batch_size):
                    features.append(encoding(images).cpu())
        pairs = torch.stack([torch.cat(features) for features in found])
        return pairs


def shared_neighbors(pairs: Tensor, bank: NDArray[Any], k: int, threads: int = 1) -> NDArray[Any]:
    """Return whether each neighbour of the first view is one of the second, bool [k, n].

    Args:
        pairs: features of two views, [2, n, D].
        bank: of the images to find neighbours among, by cosine, [m, D].
        k: number of neighbours.
        threads: that search.
    """
    from maect.evaluate.knn import nearest
    from maect.evaluate.store import in_memory

    rows = in_memory(bank)
    first, second = (nearest(rows, view.numpy(), k, threads=threads)[1] for view in pairs)
    shared: NDArray[Any] = (first[:, :, None] == second[:, None, :]).any(axis=2).T
    return shared


def _spread(pairs: Tensor) -> dict[str, float]:
    from torch.nn import functional as F

    from maect.measures import alignment, rank_me, uniformity

    return {
        "alignment": alignment(pairs),
        "uniformity": uniformity(F.normalize(pairs[0], dim=1)),
        "rank_me": rank_me(pairs[0]),
    }


def _evenly(n: int, most: int) -> NDArray[Any]:
    """Return the numbers of at most `most` of n images, evenly spaced, int64."""
    import numpy as np

    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))
