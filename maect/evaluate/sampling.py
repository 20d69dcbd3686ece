"""Held-out training images to choose settings on, and intervals by bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 95.0
_AT_ONCE = 100
ONE_IN = 10
"""Training images, for each that is held out to choose on."""


def held_out_share(train: int, test: int) -> int:
    """Return one in how many training images is held out: ten, or as many as there are test images.

    Whatever is chosen need not be measured more finely than the result.
    """
    return max(ONE_IN, -(-train // max(1, test)))


def held_out_mask(
    labels: NDArray[np.int64], contents: Sequence[str] | Sequence[int], one_in: int = ONE_IN
) -> NDArray[np.bool_]:
    """Choose about one image in `one_in` of every class, at least one of two, whatever the order.

    Those are chosen whose digests come first, a random part: names may follow time or place.

    Args:
        contents: digest of each image's content; images of the same content stay on one side.

    Returns:
        Whether an image is held out, bool [n].
    """
    by_label: dict[int, set[Any]] = {}
    for label, content in zip(labels.tolist(), contents, strict=True):
        by_label.setdefault(label, set()).add(content)
    chosen: set[Any] = set()
    for label in sorted(by_label):
        given = sorted(by_label[label])
        chosen.update(given[: max(len(given) // one_in, int(len(given) > 1))])
    return np.array([content in chosen for content in contents], bool)


def intervals(
    scores: NDArray[np.float64], resamples: int = RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return 95 % intervals of mean scores by the bootstrap over images (percentiles).

    All columns are resampled together, so the interval of a difference of two columns is that of
    the column of differences. Scores of equally many images are always resampled alike.

    Args:
        scores: of each image, such as 1 if it was classified correctly, float64 [n, measures].

    Returns:
        Lower and upper ends, float64 [measures] each.
    """
    n = len(scores)
    random = np.random.default_rng(n)
    means = []
    for start in range(0, resamples, _AT_ONCE):
        drawn = random.integers(0, n, (min(_AT_ONCE, resamples - start), n))
        counts = np.stack([np.bincount(rows, minlength=n) for rows in drawn])
        means.append(counts @ scores / n)
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail], axis=0)
    return low, high


def accuracy_intervals(
    scores: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `intervals` of scores in percent, [n, measures].

    Where all are 0, or all 100, the bootstrap has nothing to draw from: Wilson's interval.
    """
    low, high = intervals(scores)
    width = 100 * 1.96**2 / (len(scores) + 1.96**2)
    low = np.where((scores == 100).all(axis=0), 100 - width, low)
    return low, np.where((scores == 0).all(axis=0), width, high)


def interval_metrics(correct: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return the ends of the 95 % interval of accuracies as metrics, `NAME_low` and `NAME_high`.

    Args:
        correct: by metric, which test images are classified correctly, bool [n] or 0 to 1.
    """
    low, high = accuracy_intervals(100.0 * np.stack([*correct.values()], axis=1))
    found: dict[str, float] = {}
    for name, *both in zip(correct, low.tolist(), high.tolist(), strict=True):
        found |= {f"{name}_low": both[0], f"{name}_high": both[1]}
    return found
