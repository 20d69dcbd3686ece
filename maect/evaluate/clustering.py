"""Groups of vectors: k-means against the labels (paper, E), and groups without labels.

Standardised features, mini-batch k-means from many seeds; the run of lowest inertia is reported,
and the mean and standard deviation of all runs. Labels are used for the score only.

Without labels the groups are those of k-means, or communities in a graph of neighbours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, idle_cpus
from maect.evaluate.outcomes import pack
from maect.evaluate.protocols.stored_features import Clustering
from maect.evaluate.store import FeatureFile, Scale, moments, standardize, unit

SCORES = ("accuracy", "nmi", "ami", "ari")
# Less work than this (values x runs) is done before other processes have started.
SMALL = 5e7
FEWEST = 20
"""Vectors from which their own mean and deviation say something."""
GRAINS = (0.15, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
"""Resolutions of the groups in a graph, coarse to fine; 1 is that of modularity itself."""
STABLE = 4
"""Resolutions that give the same number of groups, where groups are well apart."""
NEIGHBORS = 15
"""Neighbours of each image in the graph; in small sets a tenth of all, at least 3."""
LARGEST = 10_000
"""Images whose graph is cut; more are given the group of the nearest of them."""
_SEEDS = 3


def evaluate(settings: Clustering, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Scores in percent, of the best run and over all, and the silhouette of the true classes.

    Metrics of a class subset carry its name as a prefix. Beside the JSON,
    `clustering.safetensors` keeps clusters, centres (standardised) and confusion matrix of each
    best run, and its `origin`.
    """
    test = job.features("test")
    metrics: dict[str, Any] = {}
    tensors: dict[str, NDArray[Any]] = {}
    parts = {"": np.arange(test.n)}
    for name, classes in settings.subsets.items():
        parts[f"{name}_"] = members(test, classes, name)
    for ids in parts.values():
        check(test, ids)
    for prefix, ids in parts.items():
        scores, arrays, right = best_of_runs(test, ids, settings, idle_cpus(context))
        metrics |= {prefix + key: value for key, value in scores.items()}
        job.outcomes[f"{prefix}accuracy_mean"] = pack(right)
        tensors |= {prefix + key: value for key, value in arrays.items()}
    job.write_tensors(tensors, origin(test))
    return metrics


def check(test: FeatureFile, ids: NDArray[np.int64]) -> None:
    """Refuse labels that cannot be scored, before anything is computed."""
    classes = len(np.unique(test.labels[ids]))
    if classes < 2:
        raise UserError(f"{test.path}: clustering needs at least two classes")
    if classes == len(ids):
        raise UserError(
            f"{test.path}: one sample of each of {classes} classes; the silhouette needs a class "
            "of two, so cluster a larger split"
        )


def origin(test: FeatureFile) -> dict[str, Any]:
    """Return the encoder, images and kind of features that clusters belong to."""
    known = ("encoder_sha256", "index_digest", "norm", "blocks", "pooling", "resize")
    return {key: test.record[key] for key in known if key in test.record}


def members(features: FeatureFile, classes: tuple[str, ...], name: str) -> NDArray[np.int64]:
    """Ids of the samples of some classes; a UserError if the dataset has no such class."""
    known = features.record["class_names"]
    missing = [c for c in classes if c not in known]
    if missing:
        raise UserError(f"subset {name}: {features.path} has no class {missing[0]}")
    return np.flatnonzero(np.isin(features.labels, [known.index(c) for c in classes]))


def best_of_runs(
    test: FeatureFile, ids: NDArray[np.int64], settings: Clustering, threads: int
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Cluster some samples (by ids) `settings.runs` times, in as many processes as `threads`.

    Returns the metrics, the best run's arrays, and whether each sample was right in each run,
    bool [runs, len(ids)].
    """
    from sklearn.utils.parallel import Parallel, delayed

    names, labels = np.unique(test.labels[ids], return_inverse=True)
    rows = standardized(test.values[ids])
    if len(np.unique(rows, axis=0)) < len(names):
        raise UserError(
            f"{test.path}: fewer distinct features than the {len(names)} classes; the encoder "
            "has collapsed"
        )

    # Processes: much of a run holds Python's lock, which threads would wait for.
    workers = threads if rows.size * settings.runs > SMALL else 1
    best = None
    results, right = [], []
    parallel = Parallel(workers, return_as="generator", pre_dispatch="4*n_jobs")
    runs = parallel(delayed(one_run)(rows, labels, seed, settings) for seed in range(settings.runs))
    for seed, result in enumerate(runs):
        results.append(result[:2])
        right.append(is_right(labels, result[2]))
        if best is None or result[0] < best[1][0]:
            best = seed, result
    assert best is not None
    seed, (inertia, score, clusters, centers) = best
    metrics: dict[str, Any] = dict(score)
    for key in SCORES:
        values = [scores[key] for _, scores in results]
        metrics |= {f"{key}_mean": float(np.mean(values)), f"{key}_std": float(np.std(values))}
    metrics |= {"silhouette": silhouette(rows, labels), "inertia": inertia, "best_seed": seed}
    table = contingency(labels, clusters)
    columns = assign(table)
    # Clusters without a class come last.
    rest = np.setdiff1d(np.arange(table.shape[1]), columns)
    arrays: dict[str, NDArray[Any]] = {
        "clusters": clusters,
        "centers": centers,
        "confusion": np.ascontiguousarray(table[:, np.append(columns, rest)]),
        "labels": names[labels],
    }
    return metrics, arrays, np.stack(right)


def one_run(
    rows: NDArray[np.float32], labels: NDArray[np.int64], seed: int, settings: Clustering
) -> tuple[float, dict[str, float], NDArray[np.int64], NDArray[np.float32]]:
    """One run with a single thread, so that the number of cores does not change its bits."""
    with threadpool_limits(1):
        inertia, clusters, centers = kmeans(rows, int(labels.max()) + 1, seed, settings)
        return inertia, scores(labels, clusters), clusters, centers


def standardized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows with the mean and standard deviation that they have themselves taken out."""
    return standardize(rows, moments(rows))


def kmeans(
    rows: NDArray[np.float32], clusters: int, seed: int, settings: Clustering
) -> tuple[float, NDArray[np.int64], NDArray[np.float32]]:
    """One run of scikit-learn's MiniBatchKMeans with every setting pinned.

    Its defaults have changed between releases (batch_size in 1.0, n_init in 1.4).

    Returns:
        Inertia over all rows, cluster of each row [n], centres [clusters, d].
    """
    from sklearn.cluster import MiniBatchKMeans

    model = MiniBatchKMeans(
        clusters,
        init="k-means++",
        max_iter=settings.max_iter,
        batch_size=settings.batch_size,
        compute_labels=True,
        random_state=seed,
        tol=0.0,
        max_no_improvement=10,
        init_size=None,
        n_init=settings.n_init,
        reassignment_ratio=0.01,
    ).fit(rows)
    return float(model.inertia_), model.labels_.astype(np.int64), model.cluster_centers_


def scores(labels: NDArray[np.int64], clusters: NDArray[np.int64]) -> dict[str, float]:
    """Cluster accuracy, NMI and AMI (arithmetic mean) and ARI, in percent."""
    from sklearn.metrics import (
        adjusted_mutual_info_score,
        adjusted_rand_score,
        normalized_mutual_info_score,
    )

    table = contingency(labels, clusters)
    columns = assign(table)
    hits = table[np.flatnonzero(columns >= 0), columns[columns >= 0]].sum()
    return {
        "accuracy": 100 * int(hits) / len(labels),
        "nmi": 100 * float(normalized_mutual_info_score(labels, clusters)),
        "ami": 100 * float(adjusted_mutual_info_score(labels, clusters)),
        "ari": 100 * float(adjusted_rand_score(labels, clusters)),
    }


def contingency(labels: NDArray[np.int64], clusters: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the samples of class i in cluster j: int64 [k, k], k the larger number."""
    size = int(max(labels.max(), clusters.max())) + 1
    flat = np.bincount(labels * size + clusters, minlength=size * size)
    return flat.reshape(size, size)


def assign(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each class's cluster in the matching with the most hits (Crouse 2016), int64 [k]."""
    return linear_sum_assignment(table, maximize=True)[1]


def is_right(labels: NDArray[np.int64], clusters: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each sample is in the cluster matched to its class, bool [n]."""
    right: NDArray[np.bool_] = assign(contingency(labels, clusters))[labels] == clusters
    return right


def silhouette(rows: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Mean silhouette coefficient of the true classes x 100, euclidean (Rousseeuw 1987)."""
    from sklearn.metrics import silhouette_score

    return 100 * float(silhouette_score(rows, labels))


def scale_of(vectors: NDArray[np.float32]) -> Scale | None:
    """Return mean and deviation of each column of vectors [n, width]; None below `FEWEST` rows."""
    return None if len(vectors) < FEWEST else moments(vectors)


def comparable(vectors: NDArray[np.float32], scale: Scale | None) -> NDArray[np.float32]:
    """Standardise vectors and scale them to length 1, so that products are similarities.

    Vectors of one encoder share a large mean, so that the cosine of any two is near 1. Without it
    0 means as alike as any two images of the index.

    Args:
        vectors: float32 [n, width].
        scale: of the index that they are compared with (`scale_of`); None: length 1 alone.
    """
    return unit(vectors if scale is None else standardize(vectors, scale))


@dataclass(frozen=True)
class Clusters:
    """Groups of images, the largest first.

    Attributes:
        cluster: of each image, int64 [n].
        distance: of each image to the mean of its cluster, between vectors as they are compared
            (`comparable`), float64 [n].
        grains: of a graph, the groups at other resolutions, by number: coarser and finer.
    """

    cluster: NDArray[np.int64]
    distance: NDArray[np.float64]
    grains: dict[int, Clusters] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of clusters."""
        return int(self.cluster.max()) + 1

    def members(self, number: int) -> NDArray[np.int64]:
        """Return the positions of a cluster's images, those nearest to its mean first."""
        rows = np.flatnonzero(self.cluster == number)
        return rows[np.argsort(self.distance[rows], kind="stable")]


def cluster(vectors: NDArray[np.float32], count: int | None = None) -> Clusters:
    """Group images by their vectors, which are standardised and scaled to length 1 first.

    Args:
        vectors: of the images, float32 [n, width].
        count: of clusters, for k-means (the best of three starts); None: communities in a graph of
            neighbours (`graph_groups`), which finds the number itself.

    Raises:
        UserError: fewer different images than clusters.
    """
    rows = comparable(vectors, scale_of(vectors))
    different = len(np.unique(rows, axis=0))
    wanted = count or 2
    needed = wanted if count is not None else wanted + 1
    if wanted < 2 or different < needed:
        raise UserError(
            f"{different} distinct images cannot form {wanted} clusters: at least 2 clusters are "
            "needed, and as many distinct images"
        )
    if count is not None:
        return _clusters(rows, _kmeans(rows, count))
    found = graph_groups(rows)
    grains = {int(labels.max()) + 1: _clusters(rows, labels) for labels in found.values()}
    own = _clusters(rows, found[choose_resolution(found)])
    return replace(own, grains={n: grains[n] for n in sorted(grains) if n not in (1, own.count)})


def graph_groups(rows: NDArray[np.float32]) -> dict[float, NDArray[np.int64]]:
    """Find communities in the graph of nearest neighbours, at each resolution of `GRAINS`.

    As PhenoGraph (Levine et al., Cell 2015): two images are joined if one is among the
    nearest of the other, by the part of their neighbours that they share (Jaccard), and Louvain's
    method cuts the graph.

    Args:
        rows: float32 [n, width], at length 1.
    """
    from sknetwork.clustering import Louvain

    chosen = np.arange(len(rows))
    if len(rows) > LARGEST:
        chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:LARGEST])
    graph = shared_neighbours(rows[chosen])
    like = _nearest(rows, rows[chosen], 1)[:, 0]
    found = {}
    for resolution in GRAINS:
        labels = Louvain(resolution=resolution, random_state=0).fit_predict(graph)
        found[resolution] = labels[like].astype(np.int64)
    return found


def choose_resolution(found: dict[float, NDArray[np.int64]]) -> float:
    """Return the resolution to use: one of `STABLE` that agree on a number above 1; else 1."""
    counts = {resolution: int(labels.max()) + 1 for resolution, labels in found.items()}
    times = Counter(n for n in counts.values() if n > 1)
    stable = [resolution for resolution, n in counts.items() if times[n] >= STABLE]
    return stable[0] if stable else 1.0


def shared_neighbours(rows: NDArray[np.float32]) -> Any:
    """Return the weights of the graph, sparse [n, n]: shared neighbours over all of both."""
    from scipy import sparse

    n = len(rows)
    near = _nearest(rows, rows, 1 + min(NEIGHBORS, max(3, n // 10), n - 1))
    width = near.shape[1]
    shape = np.ones(near.size, np.float64), near.ravel(), np.arange(0, near.size + 1, width)
    own = sparse.csr_array(shape, shape=(n, n))
    shared = (own @ own.T).multiply((own + own.T) > 0).tocoo()
    shared.data /= 2 * width - shared.data
    shared.setdiag(0)
    weights = sparse.csr_matrix(shared)  # what scikit-network reads
    weights.eliminate_zeros()
    return weights


def _nearest(rows: NDArray[np.float32], of: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the positions of the nearest of some rows to each row, int64 [n, count]."""
    from sklearn.neighbors import NearestNeighbors

    # Of rows at length 1 the nearest have the largest products.
    search = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(of)
    found: NDArray[np.int64] = search.kneighbors(rows, return_distance=False)
    return found


def _clusters(rows: NDArray[np.float32], labels: NDArray[np.int64]) -> Clusters:
    """Order groups by size, without gaps; measure each image's distance to its group's mean."""
    names, places, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    numbers = np.empty(len(names), np.int64)
    numbers[np.argsort(-sizes, kind="stable")] = np.arange(len(names))
    labels = numbers[places]
    distance = np.empty(len(rows))
    for number in range(len(names)):
        inside = labels == number
        distance[inside] = np.linalg.norm(rows[inside] - rows[inside].mean(axis=0), axis=1)
    return Clusters(labels, distance)


def _kmeans(rows: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    runs = (kmeans(rows, count, seed, Clustering()) for seed in range(_SEEDS))
    return min(runs, key=lambda run: run[0])[1]
