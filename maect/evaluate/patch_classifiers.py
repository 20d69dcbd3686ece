"""Segmentation by classifiers of patches, in the settings of CAPI: k-NN, logistic regression.

k-NN: every test patch takes from its k nearest training patches the most frequent class of each
pixel. Logistic regression: a patch is of the most frequent class of its pixels. Settings are those
of the highest mIoU on held-out training images, which are then added to the training patches.
Features are standardised by the patches that are not held out.
docs/results/paper/probes_beside_their_authors.csv compares settings with eval_segmentation.py.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.index import open_index
from maect.evaluate.base import (
    Count,
    EvaluationJob,
    ImageCount,
    Positive,
    encoder_checksum,
    idle_cpus,
)
from maect.evaluate.dense import Masked, MaskSplit, encode_patches, miou
from maect.evaluate.knn import nearest
from maect.evaluate.logistic import PENALTIES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array


Known: TypeAlias = "tuple[Array, NDArray[np.uint8]]"


class PatchClassifier(Masked):
    """Base of the protocols that classify patches; settings are chosen on held-out images."""

    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose settings on."""
    patches_one_in: int = Field(default=1, gt=0)
    """Learn from every so many-th training patch alone, which takes less time."""

    def encoded(self, images: ImageCount) -> float:
        """Count both splits once."""
        return images(self.train_split) + images(self.test_split)

    def patches(self, context: Context, job: EvaluationJob) -> dict[str, Patches] | None:
        """Encode and standardise training, held-out and test patches.

        Returns:
            The patches of each; None on other ranks than 0, which are done.
        """
        import numpy as np

        from maect.core import distributed
        from maect.data.subsets import held_out_mask
        from maect.evaluate.encoding import Encoding
        from maect.evaluate.store import in_memory, moments, standardize

        encoding = Encoding(
            job.run / "encoder.safetensors", distributed.device_of(context), self.precision
        )
        found = {}
        with distributed.process_group(context):
            for split in ("train", "test"):
                index = open_index(job.path(split))
                index.check_channels(encoding.settings.pixels.channels)
                masks = MaskSplit(index, open_index(job.path(f"{split}_masks")))
                features = encode_patches(context, index, encoding)
                found[split] = features, masks
        if context.rank:
            return None
        images = found["train"][1].images
        held = held_out_mask(images, max(1, images.n // self.one_in), self.seed)
        if not held.any() or held.all():
            raise UserError(f"{job.path('train')}: needs two images or more, to hold one out")
        threads = idle_cpus(context)
        size = encoding.settings.image_size
        parts = {}
        for split, (features, masks) in found.items():
            if not np.isfinite(features).all():
                raise UserError(f"{job.run}: the features are not finite; the encoder diverged")
            classes = masks.patches(size, features.shape[1], threads)
            parts[split] = Patches(features, classes)
        train = parts["train"]
        parts["held"], parts["train"] = train.of(held), train.of(~held)
        scale = moments(in_memory(parts["train"].rows()))
        return {
            name: Patches(standardize(part.features, scale), part.classes)
            for name, part in parts.items()
        }

    def training_patches(self, *parts: Patches) -> Known:
        """Return features [n, D] and classes of pixels [n, p] of patches to learn from.

        Left out are patches whose most frequent number is ignored.
        """
        import numpy as np

        features = np.concatenate([part.rows() for part in parts])[:: self.patches_one_in]
        classes = np.concatenate([part.pixels() for part in parts])[:: self.patches_one_in]
        kept = ~np.isin(most_frequent(classes), self.ignore)
        if not kept.any():
            raise UserError(f"all masks hold only the numbers {[*self.ignore]}, which are ignored")
        return features[kept], classes[kept]

    def settings(self) -> list[dict[str, Any]]:
        """List the settings to choose from."""
        raise NotImplementedError

    def predicted(
        self, known: Known, queries: Array, settings: list[dict[str, Any]], threads: int
    ) -> list[NDArray[np.uint8]]:
        """Return the class of each pixel of patches, uint8 [q, p], by each of the settings.

        Args:
            known: training patches, as `training_patches` gives them.
            queries: features of the patches, float32 [q, D].
        """
        raise NotImplementedError

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """mIoU in percent under the protocol's name, and the setting that was chosen.

        A killed job does not choose again. docs/reference/dense.md lists the metrics.
        """
        parts = self.patches(context, job)
        if parts is None:
            return {}
        train, held, test = parts["train"], parts["held"], parts["test"]
        threads = idle_cpus(context)
        settings = self.settings()

        def tried() -> list[dict[str, Any]]:
            found = self.predicted(self.training_patches(train), held.rows(), settings, threads)
            scores = [miou(held.pixels(), classes, self.ignore)[0] for classes in found]
            return [{**one, "miou": score} for one, score in zip(settings, scores, strict=True)]

        read = [open_index(job.path(name)).digest for name in self.inputs()]
        held_out = job.compute_once(context, digest(self, encoder_checksum(job.run), read), tried)
        best = max(held_out, key=itemgetter("miou"))  # of equal ones the first
        chosen = settings[held_out.index(best)]
        (classes,) = self.predicted(
            self.training_patches(train, held), test.rows(), [chosen], threads
        )
        mean, each, accuracy = miou(test.pixels(), classes, self.ignore)
        own = {self.name: mean, f"{self.name}_accuracy": accuracy, f"{self.name}_classes": each}
        return own | chosen | {"held_out": held_out}


@dataclass(frozen=True)
class Patches:
    """Patch tokens of images and the classes of their pixels.

    Attributes:
        features: float32 [images, N, D].
        classes: uint8 [images, N, p], p pixels of each patch.
    """

    features: Array
    classes: NDArray[np.uint8]

    def of(self, images: NDArray[np.bool_]) -> Patches:
        """Return the patches of some images."""
        return Patches(self.features[images], self.classes[images])

    def rows(self) -> Array:
        """Return features of all patches, [images * N, D]."""
        return self.features.reshape(-1, self.features.shape[2])

    def pixels(self) -> NDArray[np.uint8]:
        """Return classes of all patches' pixels, [images * N, p]."""
        return self.classes.reshape(-1, self.classes.shape[2])


def most_frequent(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the most frequent number of each row, [n, p] to [n]; ties: the smallest."""
    import torch

    return torch.from_numpy(classes).mode(dim=1).values.numpy()


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
        """Return the most frequent class of each pixel among k neighbours; ties: the smallest."""
        import numpy as np
        import torch

        from maect.evaluate.store import in_memory

        features, classes = known
        table = torch.from_numpy(classes)
        most = max(self.neighbours)
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
        """Return a patch's class for each of its pixels."""
        import numpy as np
        from sklearn.linear_model import LogisticRegression

        features, classes = known
        labels = most_frequent(classes)
        shape = (len(queries), classes.shape[1])
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
