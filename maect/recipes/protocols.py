"""What each evaluation can be told, as types, with the paper's values as defaults."""

from typing import Literal

from pydantic import Field

from maect.recipes.settings import Settings


class Protocol(Settings):
    """Base of the settings of an evaluation."""

    train_split: str = "train"
    test_split: str = "val"


class Knn(Protocol):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    k: int = Field(default=10, gt=0)
    temperature: float = Field(default=0.07, gt=0)
    sweep: tuple[int, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[float, ...] = (0.02, 0.07, 0.2)


class LinearProbe(Protocol):
    """Linear probing (paper, table 9): ten learning rates, trained together."""

    epochs: int = Field(default=50, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    learning_rates: tuple[float, ...] = (0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01)
    momentum: float = 0.9
    warmup_epochs: float = Field(default=5, ge=0)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    blocks: int = Field(default=1, gt=0)
    """Concatenate what the last so many blocks give."""
    cls_and_mean: bool = False
    """Concatenate [CLS] and the mean of the patch tokens, whatever the encoder's own pooling."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of the frozen encoder; the classifiers are float32."""
    seed: int = 0


class LowShot(Protocol):
    """Logistic regression on 1, 2 and 5 labels per class (paper, B), three splits each."""

    shots: tuple[int, ...] = (1, 2, 5)
    splits: int = Field(default=3, gt=0)
    l2: float = Field(default=0.00025, gt=0)
    """Weight of the penalty, divided by the number of training samples (MSN's default)."""
    solver: Literal["cyanure", "lbfgs"] = "cyanure"
    seed: int = 0
    """Seed of the subsets where no lists are given."""
    subsets: str | None = None
    """Folder of the official lists, `msn_{shots}shot_split{n}.txt`; none: seeded subsets."""


class Clustering(Protocol):
    """k-means on the test split (paper, E): `runs` seeds, best by inertia and mean."""

    runs: int = Field(default=100, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    n_init: int = Field(default=3, gt=0)
    max_iter: int = Field(default=100, gt=0)
    subsets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further clusterings of some classes only: a name for the metrics and the class names."""


class Umap(Protocol):
    """Two-dimensional UMAP embedding of the test split (paper, figures 6 and 8)."""

    neighbors: int = Field(default=15, gt=1)
    min_dist: float = Field(default=0.1, ge=0)
    metric: Literal["euclidean", "cosine"] = "euclidean"
    classes: tuple[str, ...] = ()
    """Names of the classes to show; empty: all."""
    seed: int = 0


PROTOCOLS: dict[str, type[Protocol]] = {
    "knn": Knn,
    "linear_probe": LinearProbe,
    "low_shot": LowShot,
    "clustering": Clustering,
    "umap": Umap,
}
