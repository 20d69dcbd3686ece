"""Protocols on stored features: neighbours, few labels, clusters, corrections, maps."""

import itertools
import math
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from maect.core.errors import counted
from maect.evaluate.base import (
    Count,
    Fraction,
    Input,
    KnnVote,
    OutputOf,
    Positive,
    ReadsFeatures,
    RealLabels,
    Shards,
)
from maect.recipes import KNN_K, KNN_TEMPERATURE
from maect.recipes.few_labels import FewLabels, fraction_list, fraction_name, shots_list

PENALTIES: tuple[float, ...] = tuple(round(10 ** (-6 + 11 * i / 7), 12) for i in range(8))
"""10 to the powers from -6 to 5, in seven equal steps (CAPI)."""
SHRINKAGES = (0.0, 0.01, 0.1)
REMOVED = (1, 2, 4, 8)


class Knn(KnnVote, RealLabels, ReadsFeatures):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "k-nearest neighbours"
    work: ClassVar[str] = "knn.evaluate"
    test_data: ClassVar[str | None] = (
        "knn_best_k chooses k and knn_best k and T on the test split, with and without "
        "standardisation; knn and knn_standardized choose nothing, those called _held_out "
        "choose on training images"
    )

    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)

    def headline(self) -> dict[str, str]:
        """Accuracies by the set k and T, and by those that held-out training images choose."""
        by = "k and T chosen on held-out training images"
        forms = {"knn": "k-NN", "knn_standardized": "k-NN, standardised"}
        return forms | {f"{key}_held_out": f"{title}, {by}" for key, title in forms.items()}

    def grid(self, most: int) -> list[tuple[int, float]]:
        """Return all pairs of k and temperature; k of the sweep only up to `most`."""
        counts = sorted({self.k, *(k for k in self.sweep if k <= most)})
        return [(k, t) for k in counts for t in sorted({self.temperature, *self.temperatures})]


class LowShot(FewLabels, RealLabels, ReadsFeatures):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    name: ClassVar[str] = "low_shot"
    title: ClassVar[str] = "logistic regression on few labels"
    work: ClassVar[str] = "low_shot.evaluate"
    minutes: ClassVar[float] = 20.0

    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    fractions: tuple[Fraction, ...] = ()
    """Fractions of the labels to measure as well: 0.01 and 0.1 in the paper."""
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["lbfgs"] = "lbfgs"
    """L-BFGS in float64. The problem is convex: MSN's and the paper's cyanure has the same
    optimum."""
    seed: int = 0
    """Seed of the subsets where no lists are given."""

    @model_validator(mode="after")
    def _asked(self) -> Self:
        if not self.shots and not self.fractions:
            raise ValueError("neither shots nor fractions: there is nothing to measure")
        return self

    @property
    def lists(self) -> list[Path]:
        """Return the lists of every split and every fraction."""
        if self.subsets is None:
            return []
        shots = itertools.product(self.shots, range(1, self.splits + 1))
        return [
            *(shots_list(self.subsets, *pair) for pair in shots),
            *(fraction_list(self.subsets, each) for each in self.fractions if each < 1),
        ]

    def headline(self) -> dict[str, str]:
        """Accuracies by the number or the fraction of labels."""
        how = "logistic regression"
        shots = {f"low_shot_{n}": f"{counted(n, 'label')} per class, {how}" for n in self.shots}
        return shots | {
            fraction_name(part): f"{100 * part:g} % of the labels, {how}" for part in self.fractions
        }


class Logistic(RealLabels, ReadsFeatures):
    """Logistic regression on all labels, its penalty chosen on held-out training images."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression on all labels"
    work: ClassVar[str] = "logistic.evaluate"
    minutes: ClassVar[float] = 60.0

    penalties: tuple[Positive, ...] = Field(default=PENALTIES, min_length=1)
    """C: weight of the summed loss relative to half the squared weights, as in scikit-learn."""
    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose C on."""
    max_iterations: Count = 1000


class Clustering(ReadsFeatures):
    """k-means on the test split (paper, E): `runs` seeds, best by inertia and mean."""

    name: ClassVar[str] = "clustering"
    title: ClassVar[str] = "k-means"
    work: ClassVar[str] = "clustering.evaluate"
    writes_tensors: ClassVar[bool] = True
    minutes: ClassVar[float] = 30.0
    test_data: ClassVar[str | None] = (
        "standardised with the test split's own mean and standard deviation, as the paper does"
    )
    reads: ClassVar[tuple[str, ...]] = ("test",)
    headlines: ClassVar[dict[str, str]] = {
        "accuracy": "cluster accuracy", "nmi": "NMI of clusters", "ari": "ARI of clusters",
    }  # fmt: skip

    runs: int = Field(default=100, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    n_init: int = Field(default=3, gt=0)
    max_iter: int = Field(default=100, gt=0)
    subsets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further clusterings of some classes only: a name for the metrics and the class names."""


class Geometry(ReadsFeatures):
    """k-NN, few labels and clusters after corrections that need no training."""

    name: ClassVar[str] = "geometry"
    title: ClassVar[str] = "corrections without training"
    work: ClassVar[str] = "geometry.evaluate"
    minutes: ClassVar[float] = 60.0
    headlines: ClassVar[dict[str, str]] = {
        "knn_raw": "k-NN, as the features are",
        "knn_whitened_0.01": "k-NN, whitened (shrinkage 0.01)",
        "nmi_raw": "NMI of clusters, as the features are",
        "nmi_whitened_0.01": "NMI of clusters, whitened (shrinkage 0.01)",
    }

    shrinkages: tuple[float, ...] = SHRINKAGES
    """Shrinkages of the covariance towards a multiple of the identity, before whitening."""
    removed: tuple[Count, ...] = REMOVED
    """Numbers of first principal components to leave out."""
    # Not from `KnnVote`: resolved files keep the order of these fields.
    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    shots: tuple[Count, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    seed: int = 0
    """Seed of the sets of few labels."""
    runs: int = Field(default=10, gt=0)
    """Runs of k-means."""


class Retrieval(ReadsFeatures):
    """Nearest images of some images and of cluster centres (paper, figures 7, 10 and 11)."""

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "nearest images"
    work: ClassVar[str] = "pictures.evaluate_retrieval"
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "queries and neighbours are images of the test split, clusters those of its clustering"
    )
    headlines: ClassVar[dict[str, str]] = {"query_precision": f"{title} of the query's class, %"}

    clustering: str = "clustering"
    """Evaluation whose clusters are shown."""
    subset: str = ""
    """Clusters of one of its subsets; empty: of the full split."""
    clusters: int = Field(default=15, gt=0)
    """Show at most this many clusters, the first ones."""
    queries: int = Field(default=3, gt=0)
    classes: tuple[str, ...] = ()
    """Classes whose first image is a query; empty: `queries` classes that are spread evenly."""
    neighbors: int = Field(default=10, gt=0)
    side: int = Field(default=96, gt=0)
    """Pixels of a stored thumbnail, at most the encoder's image size."""

    def inputs(self) -> dict[str, Input]:
        """Features and images of the test split, and its clusters."""
        return {
            "test": self.read(self.test_split),
            "images": Shards(self.test_split),
            "clusters": OutputOf(self.clustering),
        }


class Umap(ReadsFeatures):
    """Two-dimensional UMAP embedding of the test split (paper, figures 6 and 8)."""

    name: ClassVar[str] = "umap"
    title: ClassVar[str] = "UMAP embedding"
    work: ClassVar[str] = "pictures.evaluate_umap"
    labelled: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 25.0  # to load UMAP's compiled code
    writes_tensors: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "the embedding is fitted to the test split's features; labels only choose the classes"
    )
    headlines: ClassVar[dict[str, str]] = {}  # it is a picture
    reads: ClassVar[tuple[str, ...]] = ("test",)

    neighbors: int = Field(default=15, gt=1)
    min_dist: float = Field(default=0.1, ge=0)
    metric: Literal["euclidean", "cosine"] = "euclidean"
    classes: tuple[str, ...] = ()
    """Names of the classes to show; empty: all."""
    seed: int = 0


class Explore(ReadsFeatures):
    """A map of images (UMAP), groups of them and the nearest of each (cosine)."""

    name: ClassVar[str] = "explore"
    title: ClassVar[str] = "map, groups and look-alikes"
    work: ClassVar[str] = "pictures.evaluate_explore"
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
    """Number of clusters, for k-means; None: as many as a graph of neighbours falls into."""
    neighbors: int = Field(default=8, gt=0)
    """Look-alikes of each image, among those that are shown."""
    seed: int = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.images * self.side**2 > 5_000_000:
            raise ValueError("images x side x side is above 5,000,000: the page would not open")
        return self

    def inputs(self) -> dict[str, Input]:
        """Features and images of every split."""
        given: dict[str, Input] = {f"features_{name}": self.read(name) for name in self.splits}
        return given | {f"images_{name}": Shards(name) for name in self.splits}


def columns_of(count: int) -> int:
    """Return the number of columns in an atlas of `count` pictures."""
    return math.ceil(math.sqrt(count))
