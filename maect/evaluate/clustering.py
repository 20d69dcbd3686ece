"""k-means on the test features against the labels (paper, E).

Standardised features, mini-batch k-means from many seeds; the run of lowest inertia is reported,
and the mean and standard deviation of all runs. Labels are used for the score only.
"""

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
from maect.evaluate.store import FeatureFile, moments, standardize

SCORES = ("accuracy", "nmi", "ami", "ari")
# Less work than this (values x runs) is done before other processes have started.
SMALL = 5e7


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
        scores, arrays, right = cluster(test, ids, settings, idle_cpus(context))
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


def cluster(
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
