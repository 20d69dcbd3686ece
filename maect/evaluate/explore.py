"""Images to look through: a map of them, groups and look-alikes, all without labels.

What the report shows to somebody with images of their own. Pictures are stored with the result, so
that the page needs no images.
"""

from __future__ import annotations

import io
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.sources.base import UNLABELLED
from maect.evaluate.base import EvaluationJob, Input, ReadsFeatures, Shards
from maect.evaluate.retrieval import thumbnails
from maect.evaluate.umap import embedded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import FeatureFile

PIXELS = 5_000_000
ATLAS_BYTES = 900_000
"""What the pictures may take: a browser opens no page within the report that is beyond 2 MB."""
FEWEST = 20
_MAP_NEIGHBORS = 15  # umap-learn's default


class Explore(ReadsFeatures):
    """A map of images (UMAP), groups of them and the nearest of each (cosine)."""

    name: ClassVar[str] = "explore"
    title: ClassVar[str] = "map, groups and look-alikes"
    labelled: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 25.0  # to load UMAP's compiled code
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = "everything is fitted to the images that are shown"
    headlines: ClassVar[dict[str, str]] = {}  # it is for looking

    splits: tuple[str, ...] = Field(default=("val",), min_length=1)
    images: int = Field(default=1000, gt=0)
    """At most this many, drawn once from all splits together."""
    side: int = Field(default=64, gt=0)
    """Pixels of a stored picture, at most the encoder's image size."""
    clusters: int | None = Field(default=None, gt=1)
    """For k-means; none: as many as a graph of neighbours falls into."""
    neighbors: int = Field(default=8, gt=0)
    """Look-alikes of each image, among those that are shown."""
    seed: int = 0

    @model_validator(mode="after")
    def _fits(self) -> Explore:
        if self.images * self.side**2 > PIXELS:
            raise ValueError(f"images x side x side is above {PIXELS:,}: the page would not open")
        return self

    def inputs(self) -> dict[str, Input]:
        """Features and images of every split."""
        given: dict[str, Input] = {f"features_{name}": self.read(name) for name in self.splits}
        return given | {f"images_{name}": Shards(name) for name in self.splits}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Return how many images and groups there are, and the other numbers of groups.

        Writes `explore.safetensors`: `points` float32 [n, 2]; `splits`, `ids`, `labels` (-1 where
        unlabelled) and `clusters` int64 [n], the largest cluster first; `distance` float64 [n] to
        the cluster's mean; `grains` int64 [g], other numbers of clusters, with `grain_clusters`
        int64 [g, n] and `grain_distance` float64 [g, n]; `neighbors` int64 [n, k], positions among
        the n, and their `similarity` float32 [n, k]; `atlas`, the bytes of a JPEG with all
        pictures, row by row, in a square.
        Its metadata has the names of images, splits and classes.
        """
        import numpy as np

        from maect.data.shard_plan import image_names
        from maect.evaluate.clusters import cluster, comparable, scale_of
        from maect.evaluate.store import check_images

        files = [job.features(f"features_{name}", labelled=False) for name in self.splits]
        indices = [open_index(job.path(f"images_{name}")) for name in self.splits]
        for file, index in zip(files, indices, strict=True):
            check_images(file, index)
        splits, ids = self._drawn([file.n for file in files])
        if len(ids) < FEWEST:
            raise UserError(f"{files[0].path}: {len(ids)} images; {FEWEST} are needed to explore")
        of_split = [ids[splits == number] for number in range(len(files))]

        pairs = list(zip(files, of_split, strict=True))  # the draw is sorted by split
        vectors = np.concatenate([file.take(part) for file, part in pairs])
        groups = cluster(vectors, self.clusters)
        rows = comparable(vectors, scale_of(vectors))
        grains = [groups.grains[count] for count in sorted(groups.grains)]
        similarity = rows @ rows.T
        np.fill_diagonal(similarity, -np.inf)
        nearest = np.argsort(-similarity, axis=1, kind="stable")[:, : self.neighbors]
        points = embedded(rows, min(_MAP_NEIGHBORS, len(rows) - 1), self.seed)
        pictures = [
            thumbnails(index, part, file, self.side)
            for index, (file, part) in zip(indices, pairs, strict=True)
        ]
        classes, labels = common_classes(pairs)
        tensors: dict[str, NDArray[Any]] = {
            "points": points,
            "splits": splits,
            "ids": ids,
            "labels": labels,
            "clusters": groups.cluster,
            "distance": groups.distance,
            "grains": np.array(sorted(groups.grains), np.int64),
            "grain_clusters": np.array([one.cluster for one in grains], np.int64),
            "grain_distance": np.array([one.distance for one in grains], np.float64),
            "neighbors": nearest,
            "similarity": np.take_along_axis(similarity, nearest, axis=1),
            "atlas": np.frombuffer(atlas(np.concatenate(pictures)), np.uint8),
        }
        names: list[str] = []
        for index, part in zip(indices, of_split, strict=True):
            known = image_names(index)
            names += [known[number] for number in part.tolist()]
        about = {
            "names": names,
            "splits": list(self.splits),
            "classes": classes,
            "side": pictures[0].shape[1],
        }
        job.write_tensors(tensors, about)
        return {"images": len(ids), "clusters": groups.count, "grains": sorted(groups.grains)}

    def _drawn(self, sizes: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw split and id of each image to show, in order: the same ones for every encoder."""
        import numpy as np

        splits = np.repeat(np.arange(len(sizes)), sizes)
        ids = np.concatenate([np.arange(size) for size in sizes])
        chosen = np.random.default_rng(self.seed).permutation(len(ids))[: self.images]
        chosen.sort()
        return splits[chosen], ids[chosen]


def common_classes(
    parts: list[tuple[FeatureFile, NDArray[np.int64]]],
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the class names of all splits, and each drawn image's place among them or -1.

    Splits may have other classes: one is without labels, or is a view of some classes.
    """
    import numpy as np

    names = [
        [*known, *map(str, range(len(known), file.classes))]
        for file, _ in parts
        for known in [file.record["class_names"]]
    ]
    classes = list(dict.fromkeys(itertools.chain(*names)))
    # The last place is that of -1.
    places = [np.array([*map(classes.index, own), UNLABELLED]) for own in names]
    drawn = zip(places, parts, strict=True)
    return classes, np.concatenate([place[file.labels[part]] for place, (file, part) in drawn])


def columns_of(count: int) -> int:
    """Return how many pictures are beside each other in an atlas of this many."""
    return math.ceil(math.sqrt(count))


def atlas(pictures: NDArray[np.uint8]) -> bytes:
    """Return a JPEG of all pictures [n, S, S, 3], row by row, as good as its size allows."""
    import numpy as np
    from PIL import Image

    count, side = pictures.shape[:2]
    columns = columns_of(count)
    canvas = np.zeros((columns, columns, side, side, 3), np.uint8)
    canvas.reshape(-1, side, side, 3)[:count] = pictures
    page = Image.fromarray(canvas.swapaxes(1, 2).reshape(columns * side, columns * side, 3))
    for quality in (85, 70, 55, 40, 25):
        stream = io.BytesIO()
        page.save(stream, "JPEG", quality=quality)
        if stream.tell() <= ATLAS_BYTES:
            break
    return stream.getvalue()
