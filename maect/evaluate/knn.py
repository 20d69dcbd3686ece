"""Weighted k-nearest-neighbour classification (paper, B; Wu et al. 2018, DINO).

The k training samples of highest cosine similarity s vote for their class with weight exp(s / T).
Reported on the features as they are (`knn`), without the gain and bias of the encoder's final norm
(`knn_before_norm`: a strong gain decides which features count, and a MAE's is strong), and
standardised with the train set's mean and standard deviation (`knn_standardized`, what the authors'
logger does, which does not see them).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import Count, EvaluationJob, Features, Input, Positive, Protocol, idle_cpus
from maect.recipes import KNN_K, KNN_TEMPERATURE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import Array, FeatureFile, Scale

QUERIES = 1024
TRAIN_ROWS = 16384
_VOTES = 256


class Knn(Protocol):
    """Weighted k-NN (paper, B; DINO's protocol): reports `k` and `temperature`, sweeps both."""

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "k-nearest neighbours"
    test_data: ClassVar[str | None] = (
        "knn_best_k chooses k and knn_best k and T on the test split, however features are "
        "scaled; knn, knn_before_norm and knn_standardized choose nothing"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    sweep: tuple[Count, ...] = (1, 5, 10, 20, 50, 100, 200)
    temperatures: tuple[Positive, ...] = (0.02, 0.07, 0.2)

    def inputs(self) -> dict[str, Input]:
        """Features of both splits."""
        return {"train": Features(self.train_split), "test": Features(self.test_split)}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Metrics in percent: `knn`, `knn_standardized`, and the full sweep over k and T.

        `knn_best_k` and `knn_standardized_best_k` choose k on the test split, as the paper does for
        other methods' checkpoints; `knn_best` and `knn_standardized_best` choose k and T. The same
        of `knn_before_norm`, where the encoder has such a norm.

        Raises:
            UserError: fewer training samples than k.
        """
        import numpy as np

        from maect.evaluate.store import moments

        train, test = job.both()
        if self.k > train.n:
            raise UserError(f"knn: k {self.k} is more than the {train.n} samples of {train.path}")
        counts = sorted({self.k, *(k for k in self.sweep if k <= train.n)})
        temperatures = sorted({self.temperature, *self.temperatures})
        metrics: dict[str, Any] = {}
        sweep = []
        scales = {"knn": None, "knn_standardized": moments(train.rows, train.n, train.width)}
        if (of_norm := final_norm(job.run / "encoder.safetensors", train.width)) is not None:
            scales["knn_before_norm"] = of_norm
        for name, scale in scales.items():
            similarity, ids = nearest(train, test.all(), max(counts), scale, idle_cpus(context))
            for k in counts:
                for temperature in temperatures:
                    votes = vote(similarity[:, :k], train.labels[ids[:, :k]], temperature)
                    accuracy = 100 * int(np.sum(votes == test.labels)) / test.n
                    sweep.append(
                        {
                            "k": k,
                            "temperature": temperature,
                            "features": name,
                            "accuracy": accuracy,
                        }
                    )
                    if (k, temperature) == (self.k, self.temperature):
                        metrics[name] = accuracy
            chosen = [row for row in sweep if row["features"] == name]
            metrics[f"{name}_best"] = max(row["accuracy"] for row in chosen)
            metrics[f"{name}_best_k"] = max(
                row["accuracy"] for row in chosen if row["temperature"] == self.temperature
            )
        return {**metrics, "sweep": sweep}


def final_norm(encoder: Path, width: int) -> Scale | None:
    """Bias and gain of the norm that an encoder's features went through; None: it has none.

    A feature without a gain says nothing: its gain is infinite, which makes it 0.

    Args:
        encoder: `encoder.safetensors`, with timm's names.
        width: of the features: those of several parts went through no single norm.
    """
    import numpy as np
    from safetensors import safe_open

    if not encoder.exists():
        return None
    with safe_open(encoder, "np") as file:
        for norm in ("fc_norm", "norm"):
            if {f"{norm}.weight", f"{norm}.bias"} <= {*file.keys()}:
                gain, bias = (
                    file.get_tensor(f"{norm}.{part}").astype(np.float64)
                    for part in ("weight", "bias")
                )
                return (bias, np.where(gain == 0, np.inf, gain)) if len(gain) == width else None
    return None


def nearest(
    train: FeatureFile, queries: Array, k: int, scale: Scale | None = None, threads: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k most similar training samples of each query, most similar first.

    Products of unit vectors in blocks of one size, each by one thread: the number of threads does
    not change a bit. Of the k, equal similarities are in the order of their ids; which of several
    at the border are among the k is not said. (Cosines in float64 and a search by hand took 0.9 to
    1.1 times as long, and put 0.03 % of the neighbours, equal up to float32's rounding, elsewhere.)
    Memory: a chunk of the train set, the queries, and a block of products for each thread.

    Args:
        train: the train set, read in chunks.
        queries: float32 [q, width].
        k: neighbours, at most train.n.
        scale: what to subtract from both sides and divide them by.
        threads: how many blocks of queries are worked on at once.

    Returns:
        Cosine similarities (of a row of zeros: 0), float64 [q, k], and ids, int64 [q, k].
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    unit = _unit(queries, scale)
    best = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.zeros((len(queries), k), np.int64)
    blocks = [slice(start, start + QUERIES) for start in range(0, len(queries), QUERIES)]
    with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
        for start in range(0, train.n, TRAIN_ROWS):
            rows = _unit(train.rows(start, min(start + TRAIN_ROWS, train.n)), scale)

            def merge(block: slice, start: int = start, rows: Array = rows) -> None:
                products = unit[block] @ rows.T
                least = max(0, len(rows) - k)
                top = np.argpartition(products, least, axis=1)[:, least:]
                near = np.take_along_axis(products, top, axis=1)
                values = np.concatenate([best[block], near], axis=1)
                names = np.concatenate([ids[block], top + start], axis=1)
                order = np.lexsort((names, -values), axis=1)[:, :k]
                best[block] = np.take_along_axis(values, order, axis=1)
                ids[block] = np.take_along_axis(names, order, axis=1)

            list(pool.map(merge, blocks))
    return best.astype(np.float64), ids


def _unit(features: Array, scale: Scale | None) -> Array:
    """Standardised rows at length 1; a row of zeros stays."""
    import numpy as np

    from maect.evaluate.store import standardize

    rows = features if scale is None else standardize(features, scale)
    length: Array = np.linalg.norm(rows, axis=1, keepdims=True)
    length[length == 0] = 1
    unit: Array = rows / length
    return unit


def vote(
    similarity: NDArray[np.float64], labels: NDArray[np.int64], temperature: float
) -> NDArray[np.int64]:
    """Class of the largest summed weight exp(s / T); of equal classes the first.

    Args:
        similarity: [q, k], most similar first.
        labels: int64 [q, k].
        temperature: T.

    Returns:
        int64 [q].
    """
    import numpy as np

    # Relative to the nearest: the same vote, and no overflow at small T.
    weights = np.exp((similarity - similarity[:, :1]) / temperature)
    classes = int(labels.max()) + 1
    out = np.empty(len(labels), np.int64)
    for start in range(0, len(labels), _VOTES):
        part = slice(start, start + _VOTES)
        rows = np.arange(len(labels[part]))[:, None] * classes
        votes = np.bincount(
            (rows + labels[part]).ravel(), weights[part].ravel(), minlength=len(rows) * classes
        )
        out[part] = votes.reshape(-1, classes).argmax(axis=1)
    return out
