"""Evaluations to look at: nearest images, and a map of images, groups and look-alikes.

Nearest images of a few images and of cluster centres are in the paper's figures 7, 10 and 11. Its
figures 6 and 8 are maps; the authors published no code for them: UMAP has umap-learn's defaults,
with a fixed seed. `Explore` shows images of your own, without labels.

Pictures are stored with the results, so that drawing and the page need no images.
"""

import io
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from maect.core.context import Context
from maect.core.errors import UserError, check_names
from maect.data.index import HEIGHT, LABEL, WIDTH, Index, open_index
from maect.data.shard_plan import image_names
from maect.data.sources.base import UNLABELLED
from maect.data.transforms import center_crops
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.clustering import (
    assign,
    cluster,
    comparable,
    contingency,
    members,
    origin,
    scale_of,
    standardized,
)
from maect.evaluate.knn import nearest
from maect.evaluate.protocols.stored_features import Explore, Retrieval, Umap, columns_of
from maect.evaluate.store import Array, FeatureFile, check_images

Ids: TypeAlias = "NDArray[np.int64]"

ATLAS_BYTES = 900_000
"""Bytes of the pictures, at most: browsers open no page inside the report above 2 MB."""
FEWEST = 20
NUMBA = Path(".numba_config.yaml")
_MAP_NEIGHBORS = 15  # umap-learn's default


def evaluate_retrieval(settings: Retrieval, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Percent of neighbours of the right class: `query_precision`, `cluster_precision`.

    Writes `retrieval.safetensors` beside the JSON: `query_images` uint8 [q, S, S, 3],
    `query_labels` and `query_ids` int64 [q], `neighbor_images` [q, n, S, S, 3],
    `neighbor_labels` and `neighbor_ids` [q, n]; `cluster_images` [k, n, S, S, 3],
    `cluster_labels` and `cluster_ids` [k, n], and `cluster_classes` [k], the class that a
    cluster was matched to or -1.
    """
    test = job.features("test")
    index = open_index(job.path("images"))
    check_images(test, index)
    if test.n <= settings.neighbors:
        raise UserError(
            f"retrieval: neighbors {settings.neighbors} needs more than the {test.n} images "
            f"of {test.path}"
        )
    queries = choose_queries(test, settings.queries, settings.classes)
    neighbors = _neighbors(test, queries, settings.neighbors, idle_cpus(context))
    clusters, classes = _clusters(job.path("clusters"), test, settings)
    left: dict[str, NDArray[Any]] = {"cluster_classes": classes}
    for name, ids in (("query", queries), ("neighbor", neighbors), ("cluster", clusters)):
        left[f"{name}_ids"] = ids
        left[f"{name}_labels"] = test.labels[ids]
        left[f"{name}_images"] = thumbnails(index, ids, test, settings.side)
    job.write_tensors(left)
    right = left["neighbor_labels"] == left["query_labels"][:, None]
    matched = left["cluster_labels"] == classes[:, None]
    return {
        "query_precision": 100 * float(right.mean()),
        "cluster_precision": 100 * float(matched.mean()),
    }


def choose_queries(test: FeatureFile, count: int, names: Sequence[str] = ()) -> Ids:
    """Return the first image of some classes, the same ones for every encoder.

    Of `names`, or of `count` evenly spaced classes; a UserError if there is no image of one.
    """
    classes, first = np.unique(test.labels, return_index=True)
    if names:
        known = test.record["class_names"]
        check_names(f"retrieval: classes of {test.path}", names, known)
        numbers = [known.index(name) for name in names]
        for name, number in zip(names, numbers, strict=True):
            if number not in classes:
                raise UserError(f"retrieval: {test.path} has no image of class {name}")
        return first[np.searchsorted(classes, numbers)].astype(np.int64)
    positions = np.arange(count) * len(classes) // count
    return first[np.unique(positions)].astype(np.int64)


def _neighbors(test: FeatureFile, queries: Ids, count: int, threads: int) -> Ids:
    """Ids of the nearest other images by cosine similarity, [q, n]."""
    _, ids = nearest(test.values, test.values[queries], count + 1, threads=threads)
    # A copy with a smaller id may come before the query itself.
    others = [row[row != query][:count] for row, query in zip(ids, queries, strict=True)]
    return np.stack(others)


def _clusters(path: Path, test: FeatureFile, settings: Retrieval) -> tuple[Ids, Ids]:
    """Ids of the images nearest to centres, [k, n], and the class of each cluster, [k].

    Euclidean distance between standardised features, those that were clustered.
    """
    if not path.exists():
        raise UserError(f"{path}: no such clusters; evaluate clustering first")
    with safe_open(path, framework="numpy") as file:
        made = json.loads((file.metadata() or {}).get("maect", "null"))
    if made != origin(test):
        raise UserError(
            f"{path}: clusters of another encoder, or of other images or features, than "
            f"{test.path}; evaluate clustering again, with the same `norm` and `blocks`"
        )
    arrays = load_file(path)
    prefix = f"{settings.subset}_" if settings.subset else ""
    try:
        centers, clusters, labels = (arrays[prefix + n] for n in ("centers", "clusters", "labels"))
    except KeyError as error:
        raise UserError(f"{path}: has no {error}; evaluate clustering with that subset") from None
    ids = np.flatnonzero(np.isin(test.labels, np.unique(labels)))
    if len(ids) < settings.neighbors:
        raise UserError(f"{path}: {len(ids)} samples for {settings.neighbors} neighbors")
    names, dense = np.unique(labels, return_inverse=True)
    columns = assign(contingency(dense, clusters))[: len(names)]
    shown = min(settings.clusters, len(centers))
    classes = np.full(len(centers), -1)
    classes[columns] = names
    rows = standardized(test.values[ids]).astype(np.float64)
    distances = (np.square(rows - center).sum(axis=1) for center in centers[:shown])
    order = [np.argsort(distance, kind="stable")[: settings.neighbors] for distance in distances]
    return ids[np.stack(order)], classes[:shown].astype(np.int64)


def thumbnails(index: Index, ids: Ids, test: FeatureFile, side: int) -> NDArray[np.uint8]:
    """Return small pictures of the encoder's inputs, uint8 [..., S, S, 3]."""
    size = test.record["image_size"]
    side = min(side, size)
    resize = max(side, round(test.record["resize"] * side / size))
    flat = ids.ravel()
    if not np.array_equal(index.rows[flat][:, LABEL], test.labels[flat]):
        raise UserError(f"{test.path}: its labels are not those of {index.directory}")
    return pictures(index, flat, resize, side).reshape(*ids.shape, side, side, 3)


def pictures(index: Index, ids: Ids, resize: int, side: int) -> NDArray[np.uint8]:
    """Return centre crops of some images of a split, uint8 [n, S, S, 3]; see `center_crops`."""
    record = np.asarray(index.rows[ids])
    geometries = center_crops(record[:, WIDTH], record[:, HEIGHT], resize, side)
    out = np.empty((len(ids), 1, index.channels, side, side), np.uint8)
    for number, row in enumerate(ids.tolist()):
        index.render(row, geometries[number : number + 1], out[number])
    # Of other than three channels, the first as grey.
    out = out if index.channels == 3 else out[:, :, :1].repeat(3, axis=2)
    return np.ascontiguousarray(out[:, 0].transpose(0, 2, 3, 1))


def evaluate_explore(settings: Explore, context: Context, job: EvaluationJob) -> dict[str, Any]:
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
    vectors = np.concatenate([file.values[part] for file, part in pairs])
    groups = cluster(vectors, settings.clusters)
    rows = comparable(vectors, scale_of(vectors))
    grains = [groups.grains[count] for count in sorted(groups.grains)]
    similarity = rows @ rows.T
    np.fill_diagonal(similarity, -np.inf)
    alike = np.argsort(-similarity, axis=1, kind="stable")[:, : settings.neighbors]
    points = embedded(rows, min(_MAP_NEIGHBORS, len(rows) - 1), settings.seed)
    shown = [
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
        "neighbors": alike,
        "similarity": np.take_along_axis(similarity, alike, axis=1),
        "atlas": np.frombuffer(atlas(np.concatenate(shown)), np.uint8),
    }
    names: list[str] = []
    for index, part in zip(indices, of_split, strict=True):
        known = image_names(index)
        names += [known[number] for number in part.tolist()]
    about = {
        "names": names,
        "splits": list(settings.splits),
        "classes": classes,
        "side": shown[0].shape[1],
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
    points = embedded(test.values[ids], settings.neighbors, settings.seed, **options)
    job.write_tensors({"points": points, "labels": test.labels[ids], "ids": ids})
    return {"samples": len(ids)}
