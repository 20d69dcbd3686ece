"""Images to look through: a map of them (UMAP), groups and look-alikes, all without labels.

What the report shows to somebody with images of their own. Pictures are stored with the result, so
that the page needs no images. The paper's figures 6 and 8 are such maps; the authors published no
code for them: umap-learn's defaults, with a fixed seed.
"""

import io
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.shard_plan import image_names
from maect.data.sources.base import UNLABELLED
from maect.evaluate.base import EvaluationJob
from maect.evaluate.clustering import members
from maect.evaluate.clusters import cluster, comparable, scale_of
from maect.evaluate.protocols.stored_features import Explore, Umap, columns_of
from maect.evaluate.retrieval import thumbnails
from maect.evaluate.store import Array, FeatureFile, check_images

ATLAS_BYTES = 900_000
"""Bytes of the pictures, at most: browsers open no page inside the report above 2 MB."""
FEWEST = 20
NUMBA = Path(".numba_config.yaml")
_MAP_NEIGHBORS = 15  # umap-learn's default


def evaluate(settings: Explore, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Return how many images and groups there are, and the other numbers of groups.

    Writes `explore.safetensors`: `points` float32 [n, 2]; `splits`, `ids`, `labels` (-1 where
    unlabelled) and `clusters` int64 [n], the largest cluster first; `distance` float64 [n] to
    the cluster's mean; `grains` int64 [g], other numbers of clusters, with `grain_clusters`
    int64 [g, n] and `grain_distance` float64 [g, n]; `neighbors` int64 [n, k], positions among
    the n, and their `similarity` float32 [n, k]; `atlas`, the bytes of a JPEG with all
    pictures, row by row, in a square.
    Its metadata has the names of images, splits and classes.
    """
    files = [job.features(f"features_{name}", labelled=False) for name in settings.splits]
    indices = [open_index(job.path(f"images_{name}")) for name in settings.splits]
    for file, index in zip(files, indices, strict=True):
        check_images(file, index)
    splits, ids = _drawn(settings, [file.n for file in files])
    if len(ids) < FEWEST:
        raise UserError(f"{files[0].path}: {len(ids)} images; {FEWEST} are needed to explore")
    of_split = [ids[splits == number] for number in range(len(files))]

    pairs = list(zip(files, of_split, strict=True))  # the draw is sorted by split
    vectors = np.concatenate([file.take(part) for file, part in pairs])
    groups = cluster(vectors, settings.clusters)
    rows = comparable(vectors, scale_of(vectors))
    grains = [groups.grains[count] for count in sorted(groups.grains)]
    similarity = rows @ rows.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, : settings.neighbors]
    points = embedded(rows, min(_MAP_NEIGHBORS, len(rows) - 1), settings.seed)
    pictures = [
        thumbnails(index, part, file, settings.side)
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
        "splits": list(settings.splits),
        "classes": classes,
        "side": pictures[0].shape[1],
    }
    job.write_tensors(tensors, about)
    return {"images": len(ids), "clusters": groups.count, "grains": sorted(groups.grains)}


def _drawn(settings: Explore, sizes: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw split and id of each image to show, in order: the same ones for every encoder."""
    splits = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.concatenate([np.arange(size) for size in sizes])
    chosen = np.random.default_rng(settings.seed).permutation(len(ids))[: settings.images]
    chosen.sort()
    return splits[chosen], ids[chosen]


def common_classes(
    parts: list[tuple[FeatureFile, NDArray[np.int64]]],
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the class names of all splits, and each drawn image's place among them or -1.

    Splits may have other classes: one is without labels, or is a view of some classes.
    """
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


def atlas(pictures: NDArray[np.uint8]) -> bytes:
    """Return a JPEG of all pictures [n, S, S, 3], row by row, as good as its size allows."""
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


def embedded(rows: Array, neighbors: int, seed: int, **options: Any) -> Array:
    """Embed rows [n, width] as points [n, 2] by UMAP, with `options` of umap-learn.

    Refused, by a UserError, if a file of the working folder would configure UMAP's compiler.
    """
    if os.path.lexists(NUMBA):
        raise UserError(f"{NUMBA.absolute()}: Numba would be configured by it; move it away")
    from umap import UMAP  # it takes seconds

    # With more jobs, the layout would not be reproducible.
    found = UMAP(n_neighbors=neighbors, random_state=seed, n_jobs=1, **options).fit_transform(rows)
    return found.astype(np.float32)


def evaluate_umap(settings: Umap, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Write `umap.safetensors`: `points` float32 [n, 2], `labels` and `ids` int64 [n]."""
    test = job.features("test", labelled=False)
    ids = members(test, settings.classes, "classes") if settings.classes else np.arange(test.n)
    if len(ids) <= settings.neighbors:
        raise UserError(
            f"umap: neighbors {settings.neighbors} needs more than the {len(ids)} samples "
            f"of {test.path}"
        )
    options = {"min_dist": settings.min_dist, "metric": settings.metric}
    points = embedded(test.take(ids), settings.neighbors, settings.seed, **options)
    job.write_tensors({"points": points, "labels": test.labels[ids], "ids": ids})
    return {"samples": len(ids)}
