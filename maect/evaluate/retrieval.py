"""Nearest images of a few images and of cluster centres (paper, figures 7, 10 and 11).

Thumbnails are stored with the result, so that drawing needs no images.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from maect.core.context import Context
from maect.core.errors import UserError, check_names
from maect.data.index import HEIGHT, LABEL, WIDTH, Index, open_index
from maect.data.transforms import center_crops
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.clustering import assign, contingency, origin, standardized
from maect.evaluate.knn import nearest
from maect.evaluate.protocols.stored_features import Retrieval
from maect.evaluate.store import FeatureFile, check_images

Ids: TypeAlias = "NDArray[np.int64]"


def evaluate(settings: Retrieval, context: Context, job: EvaluationJob) -> dict[str, Any]:
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
    _, ids = nearest(test, test.take(queries), count + 1, threads=threads)
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
    rows = standardized(test.take(ids)).astype(np.float64)
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
