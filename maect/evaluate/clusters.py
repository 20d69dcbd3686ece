"""Groups of vectors without labels, by k-means or HDBSCAN; their number may be open."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError

MOST = 30
"""Clusters that are tried when their number is not given."""
_SEEDS = 3
_SILHOUETTE_ROWS = 2000
_COMPONENTS = 50


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows at length 1; a row of zeros stays."""
    length: NDArray[np.float32] = np.linalg.norm(rows, axis=1, keepdims=True)
    length[length == 0] = 1
    out: NDArray[np.float32] = rows / length
    return out


@dataclass(frozen=True)
class Clusters:
    """Groups of images, the largest first.

    Attributes:
        cluster: of each image, int64 [n]; -1: of none (HDBSCAN).
        distance: of each image to the mean of its cluster, between unit vectors, float64 [n]; NaN
            where it has none.
        scores: silhouette coefficient of each number of clusters that was tried.
    """

    cluster: NDArray[np.int64]
    distance: NDArray[np.float64]
    scores: dict[int, float]

    @property
    def count(self) -> int:
        """Number of clusters."""
        return int(self.cluster.max()) + 1

    def members(self, number: int) -> NDArray[np.int64]:
        """Positions of a cluster's images, those nearest to its mean first."""
        rows = np.flatnonzero(self.cluster == number)
        return rows[np.argsort(self.distance[rows], kind="stable")]


def cluster(
    vectors: NDArray[np.float32],
    count: int | None = None,
    method: Literal["kmeans", "hdbscan"] = "kmeans",
    smallest: int | None = None,
) -> Clusters:
    """Group images by their vectors, which are scaled to length 1 first.

    Args:
        vectors: of the images, float32 [n, width].
        count: of clusters, for k-means; none: that with the largest silhouette coefficient (of at
            most 2,000 images, drawn once) among 2 to 30.
        method: k-means (the best of three starts), or scikit-learn's HDBSCAN on the first 50
            principal components, which finds the number itself and leaves outliers alone.
        smallest: images of a cluster at least, for HDBSCAN; none: 1 % of them, and 5 at least.

    Raises:
        UserError: fewer different images than clusters, or a number that the method does not take.
    """
    if method == "hdbscan" and count is not None:
        raise UserError("hdbscan finds the number of clusters itself: leave out --clusters")
    if method == "kmeans" and smallest is not None:
        raise UserError("k-means has no smallest cluster: leave out --smallest, or take hdbscan")
    rows = unit(vectors)
    different = len(np.unique(rows, axis=0))
    wanted = count or 2
    if wanted < 2 or different < wanted + (count is None):
        raise UserError(
            f"{different} distinct images cannot form {wanted} clusters: at least 2 clusters are "
            "needed, and as many distinct images"
        )
    scores: dict[int, float] = {}
    if method == "hdbscan":
        labels = _hdbscan(rows, smallest or max(5, len(rows) // 100))
    elif count is not None:
        labels = _kmeans(rows, count)
    else:
        found = {k: _kmeans(rows, k) for k in range(2, min(MOST, different - 1) + 1)}
        scores = {k: _silhouette(rows, labels) for k, labels in found.items()}
        labels = found[max(scores, key=scores.__getitem__)]
    labels = _largest_first(labels)
    distance = np.full(len(rows), np.nan)
    for number in range(labels.max() + 1):
        inside = labels == number
        distance[inside] = np.linalg.norm(rows[inside] - rows[inside].mean(axis=0), axis=1)
    return Clusters(labels, distance, scores)


def _kmeans(rows: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    from maect.evaluate.clustering import Clustering, kmeans

    runs = (kmeans(rows, count, seed, Clustering()) for seed in range(_SEEDS))
    return min(runs, key=lambda run: run[0])[1]


def _hdbscan(rows: NDArray[np.float32], smallest: int) -> NDArray[np.int64]:
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    if smallest < 2 or smallest > len(rows):
        raise UserError(
            f"a smallest cluster of {smallest} images: must be between 2 and {len(rows)}, the "
            "number of images"
        )
    components = min(_COMPONENTS, *rows.shape)
    reduced = PCA(components, random_state=0).fit_transform(rows)
    labels: NDArray[np.int64] = HDBSCAN(min_cluster_size=smallest, copy=True).fit_predict(reduced)
    return labels.astype(np.int64)


def _silhouette(rows: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    from sklearn.metrics import silhouette_score

    chosen = np.random.default_rng(0).permutation(len(rows))[:_SILHOUETTE_ROWS]
    if not 1 < len(np.unique(labels[chosen])) < len(chosen):
        return -1.0
    return float(silhouette_score(rows[chosen], labels[chosen]))


def _largest_first(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Clusters numbered by their size, without gaps."""
    names, sizes = np.unique(labels[labels >= 0], return_counts=True)
    order = names[np.argsort(-sizes, kind="stable")]
    numbers = np.full(int(labels.max(initial=-1)) + 2, -1)
    numbers[order] = np.arange(len(order))
    return numbers[labels]  # -1 is the last one, which stays -1
