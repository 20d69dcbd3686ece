"""Pairs of images that are more alike than random ones, and files under two names.

How alike two different images may be depends on the images: scans of digits have cosines and
hashes that only copies of photographs have. So the border is found in random pairs. Few of them are
close, and the number of those within a distance x grows as a power of x, as in a cloud of points.
Two quantiles give the power; the border is the distance within which one pair is expected.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.data.sources.base import Entry, ImageSource

SAMPLED = 500_000
"""Random pairs that the border is found in."""
MOST = 100_000
"""Pairs that are listed."""
_COPIES = 3
"""Near-duplicates an image may have, on average, without moving the border."""
_QUANTILE, _WIDER = 0.001, 10
_FEWEST = 10
"""Images whose pairs say something."""
_ROWS = 4096

Array = NDArray[np.float32]


def random_pairs(n: int, m: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of random pairs of n images, or of n with m others; all, if they are few."""
    if m is None:
        if n * (n - 1) // 2 <= SAMPLED:
            i, j = np.triu_indices(n, 1)
            return i, j
        i, j = np.random.default_rng(0).integers(0, n, (2, SAMPLED))
        return i[i != j], j[i != j]
    if n * m <= SAMPLED:
        i, j = np.divmod(np.arange(n * m), m)
        return i, j
    random = np.random.default_rng(0)
    return random.integers(0, n, SAMPLED), random.integers(0, m, SAMPLED)


def products_of(
    one: Array, i: NDArray[np.int64], other: Array, j: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the product of each pair of rows, [pairs]."""
    found = np.empty(len(i), np.float32)
    for start in range(0, len(i), _ROWS):
        part = slice(start, start + _ROWS)
        found[part] = np.einsum("nd,nd->n", one[i[part]], other[j[part]])
    return found


def border(distances: NDArray[np.floating], images: int, pairs: int) -> float | None:
    """Return the distance within which one of all pairs is expected, if all images differ.

    None: of so few images, or without any spread, nothing is known.

    Args:
        distances: of random pairs.
        images: how many there are; a few near-duplicates of each do not move the border.
        pairs: how many pairs of them there are.
    """
    if images < _FEWEST:
        return None
    small = min(0.25, max(_QUANTILE, _COPIES / images))
    large = min(0.5, _WIDER * small)
    near, far = np.quantile(distances, [small, large])
    if not 0 < near < far:
        return None
    power = np.log(large / small) / np.log(far / near)
    return float(near * (1 / max(1.0, pairs * small)) ** (1 / power))


def near_rows(
    one: Array, other: Array, least: float, within: bool = False
) -> Iterator[tuple[int, int, float]]:
    """Yield the rows of both whose product is at least `least`, and the product, block by block.

    Args:
        within: both are the same images: each pair once, the first row smaller.
    """
    for start in range(0, len(one), _ROWS):
        for begin in range(start if within else 0, len(other), _ROWS):
            products = one[start : start + _ROWS] @ other[begin : begin + _ROWS].T
            if within and begin == start:
                products[np.tril_indices(len(products), 0, products.shape[1])] = -np.inf
            for i, j in np.argwhere(products >= least):
                yield start + int(i), begin + int(j), float(products[i, j])


def most_of(
    found: Iterable[tuple[int, int, float]], most: int = MOST
) -> tuple[dict[tuple[int, int], float], bool]:
    """Return pairs with their largest product, the most alike of them, and whether some are cut."""
    kept: dict[tuple[int, int], float] = {}
    cut = False

    def best() -> dict[tuple[int, int], float]:
        order = sorted(kept.items(), key=lambda item: (-item[1], item[0]))
        return dict(order[:most])

    for i, j, product in found:
        kept[i, j] = max(product, kept.get((i, j), product))
        if len(kept) > 2 * most:
            kept, cut = best(), True
    return best(), cut or len(kept) > most


def file_of(source: ImageSource, entry: Entry) -> Path | None:
    """Return the file of an image; None if it is inside another file, or gone."""
    inside = entry.offset >= 0 or source.file_of(entry) != entry.path
    path = source.root / entry.path
    return None if inside or not path.is_file() else path


def link_between(one: Path | None, other: Path | None) -> str:
    """Return how two names are of one file: "symbolic link", "hard link", or "" if they are not."""
    if one is None or other is None or not os.path.samefile(one, other):
        return ""
    same = os.path.realpath(one) == os.path.realpath(other)
    return "symbolic link" if same else "hard link"


def linked_names(source: ImageSource, entries: Sequence[Entry]) -> dict[int, tuple[int, str]]:
    """Return the images whose file has another name, by position: that name's position, and how.

    The name that is no symbolic link is the other one, of several the first.
    """
    by_file: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    root = os.path.realpath(source.root)
    for number, entry in enumerate(entries):
        if (path := file_of(source, entry)) is not None:
            status = path.stat()
            is_link = os.path.realpath(path) != os.path.join(root, entry.path)
            by_file.setdefault((status.st_dev, status.st_ino), []).append((is_link, number))
    found: dict[int, tuple[int, str]] = {}
    for names in by_file.values():
        (_, first), *others = sorted(names)
        for is_link, number in others:
            found[number] = first, "symbolic link" if is_link else "hard link"
    return found
