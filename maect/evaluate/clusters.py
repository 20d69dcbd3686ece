"""Groups of vectors without labels: by a graph of neighbours, or k-means."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.evaluate.clustering import kmeans
from maect.evaluate.protocols.stored_features import Clustering
from maect.evaluate.store import Scale, moments, standardize

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


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to length 1; rows of zeros stay."""
    length: NDArray[np.float32] = np.linalg.norm(rows, axis=1, keepdims=True)
    length[length == 0] = 1
    return rows / length


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
