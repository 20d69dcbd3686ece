"""Outcomes of single test images, intervals, and tests of two encoders on the same images.

A result keeps which images were right, in the order of its split (`provenance` has the digest), so
that a difference can be judged by the images on which two encoders disagree. That is a smaller
error than that of two independent samples. Also held-out training images to choose settings on.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.records import EvaluationRecord, Outcome

_MOST = 2**16 - 1
RESAMPLES = 2000
LEVEL = 95.0
_AT_ONCE = 100
ONE_IN = 10
"""One training image in this many is held out to choose on."""


def pack(right: NDArray[np.bool_]) -> Outcome:
    """Pack the outcomes of repeated trials on the same images for a result.

    Args:
        right: whether each image was right, bool [n] or, of several trials, [trials, n].
    """
    trials = np.atleast_2d(right)
    if len(trials) > _MOST:
        raise ValueError(f"{len(trials)} trials, more than {_MOST}")
    counts = trials.sum(axis=0).astype("<u2")
    text = base64.b64encode(zlib.compress(counts.tobytes(), 9)).decode()
    return Outcome(images=trials.shape[1], trials=len(trials), right=text)


def unpack(kept: Outcome) -> NDArray[np.float64]:
    """Return the share of the trials in which each image was right, float64 [n], 0 to 1.

    Raises:
        ValueError: it is not what `pack` gives.
    """
    try:
        data = zlib.decompress(base64.b64decode(kept.right, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"not the outcomes of images ({error})") from None
    counts = np.frombuffer(data, "<u2") if len(data) % 2 == 0 else np.empty(0, "<u2")
    if len(counts) != kept.images or (counts > kept.trials).any():
        raise ValueError(f"not the outcomes of {kept.images} images in {kept.trials} trials")
    return counts / kept.trials


@dataclass(frozen=True)
class Difference:
    """Difference of two encoders on the same images, the second minus the first, in points.

    Attributes:
        low: lower end of the 95 % interval, by the bootstrap over images.
        high: its upper end.
        gained: images that only the second has right; None if trials were averaged.
        lost: images that only the first has right; likewise.
        p: of the two-sided test that the true difference is 0. With single trials it is McNemar's
            exact test, with averaged ones the sign-flip test of the images' differences in its
            normal approximation.
    """

    images: int
    value: float
    low: float
    high: float
    gained: int | None
    lost: int | None
    p: float


def difference(first: NDArray[np.float64], second: NDArray[np.float64]) -> Difference:
    """Compare two encoders on the same images.

    Args:
        first: share of right trials of each image, float64 [n], as `unpack` gives it.
        second: likewise, of the second encoder.

    Raises:
        ValueError: the lengths differ or are zero.
    """
    if first.shape != second.shape or not len(first):
        raise ValueError(f"outcomes of {len(first)} and {len(second)} images")
    change = second - first
    low, high = intervals(100 * change[:, None])
    gained = lost = None
    if np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all():
        gained = int((change > 0).sum())
        lost = int((change < 0).sum())
        p = mcnemar(gained, lost)
    else:
        p = sign_flips(change)
    value = 100 * float(change.mean())
    return Difference(len(first), value, float(low[0]), float(high[0]), gained, lost, p)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test (McNemar 1947; a binomial test).

    Images on which both agree say nothing; each other one is gained or lost with equal chance if
    there is no difference.
    """
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def sign_flips(change: NDArray[np.float64]) -> float:
    """Return the two-sided p that differences have random signs: sum² / sum of squares, normal."""
    from scipy.stats import norm

    squares = float(np.square(change).sum())
    return float(2 * norm.sf(abs(change.sum()) / np.sqrt(squares))) if squares else 1.0


def holm(chances: Sequence[float]) -> list[float]:
    """Correct the p of several tests, so that all of them together err at most at the level.

    Holm (1979): the smallest of m is multiplied by m, the next by m - 1, and so on; none falls
    below one before it, and none exceeds 1.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(chances)), key=chances.__getitem__)
    corrected = [0.0] * len(chances)
    highest = 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[number]))
        corrected[number] = highest
    return corrected


def outcomes_of(path: str | Path) -> tuple[str, Mapping[str, Outcome]]:
    """Return a result's outcomes by metric, and the digest of the images that they are of.

    Raises:
        UserError: no result, or one that kept none.
    """
    result = EvaluationRecord.read(Path(path))
    if not result.outcomes:
        raise UserError(f"{path}: keeps no outcomes of single images; delete it and evaluate again")
    splits: dict[str, Any] = result.provenance["splits"]
    return splits["test"]["index_digest"], result.outcomes


def compare_results(first: str | Path, second: str | Path) -> dict[str, Difference]:
    """Compare two results of one protocol, by the metrics of which both kept outcomes.

    Raises:
        UserError: no results, results without outcomes, or of other images.

    Examples:
        >>> folder = "results/birds/evaluations"
        >>> compare_results(f"{folder}/mae/knn.json", f"{folder}/ct_min/knn.json")
    """
    (images, one), (others, two) = outcomes_of(first), outcomes_of(second)
    if images != others:
        raise UserError(f"{first} and {second}: of other test images; compare results of one split")
    return {name: difference(unpack(one[name]), unpack(two[name])) for name in one if name in two}


def held_out_for(
    labels: NDArray[np.int64], contents: Sequence[str] | Sequence[int], tests: int
) -> NDArray[np.bool_]:
    """Choose training images to hold out: one in ten, or about as many as test images if fewer.

    A choice need not be measured more finely than the result. Arguments are those of
    `held_out_by_content`, and the number of test images.
    """
    return held_out_by_content(labels, contents, max(ONE_IN, -(-len(labels) // max(1, tests))))


def held_out_by_content(
    labels: NDArray[np.int64], contents: Sequence[str] | Sequence[int], one_in: int = ONE_IN
) -> NDArray[np.bool_]:
    """Choose about one image in `one_in` of every class, at least one of two, whatever the order.

    Those are chosen whose digests come first, a random part: names may follow time or place. What
    is there more often than there are images left to choose is passed over; if everything is, the
    rarest is taken. No class is held out as a whole.

    Args:
        contents: digest of each image's content; images of the same content stay on one side.

    Returns:
        Whether an image is held out, bool [n].
    """
    by_label: dict[int, Counter[Any]] = {}
    for label, content in zip(labels.tolist(), contents, strict=True):
        by_label.setdefault(label, Counter())[content] += 1
    chosen: set[Any] = set()
    for counts in by_label.values():
        if len(counts) == 1:
            continue
        left = max(1, counts.total() // one_in)
        taken = []
        for content in sorted(counts):
            if counts[content] <= left:
                taken.append(content)
                left -= counts[content]
        chosen.update(taken or [min(counts, key=lambda content: (counts[content], content))])
    for _, counts in sorted(by_label.items()):
        if chosen.issuperset(counts):  # by what other classes have, too
            chosen.discard(max(counts, key=lambda content: (counts[content], content)))
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
    means = [counts.astype(np.float64) @ scores / n for counts in _resampled(n, resamples)]
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail], axis=0)
    return low, high


@lru_cache(maxsize=1)  # pages compare many pairs on the same images
def _resampled(n: int, resamples: int) -> list[NDArray[np.uint8]]:
    """Return how often each of `n` images is drawn, [100, n] of as many resamples at a time."""
    random = np.random.default_rng(n)
    counts = []
    for start in range(0, resamples, _AT_ONCE):
        drawn = random.integers(0, n, (min(_AT_ONCE, resamples - start), n))
        counts.append(np.stack([np.bincount(rows, minlength=n) for rows in drawn]).astype(np.uint8))
    return counts


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
