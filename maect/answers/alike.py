"""Find pairs of images: equal files, links, and pairs that are more alike than random ones.

How alike two different images may be depends on the images: scans of digits have cosines and
hashes that only copies of photographs have. So the border is found in random pairs. Few of them are
close, and the number of those within a distance x grows as a power of x, as in a cloud of points.
Two quantiles give the power; the border is the distance within which one pair is expected.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BITS = 64
"""Length of a perceptual hash."""
NEAR = 10
"""Bits of a hash in which two pictures of the same thing may differ, if other pictures do not."""
LEAST = 0.95
"""Cosine of the vectors of near-duplicates, or more if random pairs ask for more."""
SAMPLED = 500_000
"""Random pairs that the border is found in."""
MOST = 100_000
"""Near-duplicates that are listed."""
_COPIES = 3
"""Near-duplicates an image may have, on average, without moving the border."""
_QUANTILE = 0.001
_WIDER = 10
_FEWEST = 10
"""Images whose pairs say something."""
_ROWS = 4096

Array = NDArray[np.float32]
Rows = NDArray[np.int64]


Kind = Literal["equal", "near", "symbolic link", "hard link"]


@dataclass(frozen=True)
class Pair:
    """Two images that are the same, or more alike than random pairs of these images.

    Attributes:
        a, b: their names.
        split_a, split_b: their splits; "" in a folder.
        kind: two files that are equal, byte for byte; pictures that are alike; or two names of one
            file, which is no copy.
        bits: of 64 in which their perceptual hashes differ, the second as it is or mirrored; or
            None without hashes.
        similarity: cosine of their standardised vectors; None without vectors.
    """

    a: str
    b: str
    split_a: str
    split_b: str
    kind: Kind
    bits: int | None
    similarity: float | None


@dataclass(frozen=True)
class SearchedImages:
    """The images to search, those of a split together.

    Attributes:
        names: of the n images.
        digests: SHA-256 of each file; None of one that is known to have no equal.
        splits: of each image; "" in a folder.
        links: images that are another name of a file, by position: the first name's, and how.
        hashes: perceptual hashes, ±1, [n, 64]; None: not computed.
        mirrored: of the mirrored images, likewise.
        vectors: standardised, of length 1, [n, width]; None: there are none.
    """

    names: Sequence[str]
    digests: Sequence[bytes | None]
    splits: Sequence[str]
    links: dict[int, tuple[int, Kind]]
    hashes: Array | None = None
    mirrored: Array | None = None
    vectors: Array | None = None


@dataclass(frozen=True)
class Found:
    """Pairs of images, and from where on two images are near-duplicates.

    Attributes:
        pairs: equal files, near-duplicates, links.
        bits: of 64 in which near-duplicates differ at most; below 0: hashes tell nothing here;
            None without hashes.
        similarity: of near-duplicates' vectors, at least; None without vectors.
        cut: whether there are more near-duplicates than are listed.
    """

    pairs: list[Pair]
    bits: int | None
    similarity: float | None
    cut: bool

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the pairs as they are written."""
        return [asdict(pair) for pair in self.pairs]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many pairs are `equal`, `near`, or a `link`."""
        found = Counter(pair.kind.rpartition(" ")[2] for pair in self.pairs)
        return {kind: found[kind] for kind in ("equal", "near", "link")}


def find_pairs(images: SearchedImages, most: int = MOST) -> Found:
    """Find equal files, links and near-duplicates; of several splits the pairs across two.

    An image may be there a thousand times: each copy is paired with the first of each split.

    Args:
        most: number of near-duplicates to return at most, the most alike.
    """
    splits = images.splits
    links = images.links
    within = len(set(splits)) == 1
    # Inside a split a link is no image of its own.
    files = [i for i in range(len(splits)) if i not in links or splits[links[i][0]] != splits[i]]
    equal, kept = _equal_files(images, files, within)
    parts = [kept[[splits[i] == split for i in kept]] for split in dict.fromkeys(splits)]
    compared = [(kept, kept)] if within else list(combinations(parts, 2))
    bits = None
    similarity = None
    candidates: list[Iterator[tuple[int, int, float]]] = []
    if images.hashes is not None and images.mirrored is not None:
        bits = near_bits(images.hashes, images.mirrored, compared)
        for other in (images.hashes, images.mirrored):
            candidates.append(_near(images.hashes, other, BITS - 2 * bits, compared))
    if images.vectors is not None:
        similarity = _least_cosine(images.vectors, compared)
        by_vector = _near(images.vectors, images.vectors, similarity, compared)
        candidates.append((i, j, BITS * product) for i, j, product in by_vector)
    digests = images.digests
    different = (
        (i, j, product)
        for i, j, product in chain(*candidates)
        if digests[i] is None or digests[i] != digests[j]
    )
    near, cut = most_of(different, most)
    linked = [
        _pair(images, i, j, how)
        for j, (i, how) in sorted(links.items())
        if within or splits[i] != splits[j]
    ]
    copies = [_pair(images, i, j, "equal") for i, j in equal]
    alike = [_pair(images, i, j, "near") for i, j in near]
    return Found([*copies, *alike, *linked], bits, similarity, cut)


def _pair(images: SearchedImages, i: int, j: int, kind: Kind) -> Pair:
    """Return the facts that two images share."""
    bits = None
    similarity = None
    if images.hashes is not None and images.mirrored is not None:
        product = max(images.hashes[i] @ images.hashes[j], images.hashes[i] @ images.mirrored[j])
        bits = int((BITS - product) / 2)
    if images.vectors is not None:
        similarity = min(1.0, float(images.vectors[i] @ images.vectors[j]))
        if kind != "near":
            similarity = 1.0
    names = images.names
    splits = images.splits
    return Pair(names[i], names[j], splits[i], splits[j], kind, bits, similarity)


def _equal_files(
    images: SearchedImages, files: list[int], within: bool
) -> tuple[list[tuple[int, int]], Rows]:
    """Return the pairs of equal files, and of each split one of those that are equal."""
    linked_to = {i for i, _ in images.links.values()}
    # The file behind a link comes first: the others can go without breaking it.
    in_order = sorted(files, key=lambda i: (i not in linked_to, i))
    firsts: dict[bytes, dict[str, int]] = {}
    kept = []
    for i in in_order:
        digest = images.digests[i]
        if digest is None:
            kept.append(i)
        elif images.splits[i] not in firsts.setdefault(digest, {}):
            firsts[digest][images.splits[i]] = i
            kept.append(i)
    pairs = set()
    for i in in_order:
        for split, first in firsts.get(images.digests[i] or b"", {}).items():
            if split == images.splits[i]:
                if within and first != i:
                    pairs.add((first, i))
            elif not _are_linked(images, first, i):
                pairs.add((min(first, i), max(first, i)))
    return sorted(pairs), np.array(sorted(kept), np.int64)


def _are_linked(images: SearchedImages, i: int, j: int) -> bool:
    """Return whether one of two images is listed as a link to the other."""
    return images.links.get(i, (-1,))[0] == j or images.links.get(j, (-1,))[0] == i


def near_bits(hashes: Array, mirrored: Array, compared: Sequence[tuple[Rows, Rows]]) -> int:
    """Return in how many bits near-duplicates differ at most; below 0: hashes tell nothing."""

    def distances(i: Rows, j: Rows) -> NDArray[np.floating]:
        as_it_is = products_of(hashes, i, hashes, j)
        return (BITS - np.maximum(as_it_is, products_of(hashes, i, mirrored, j))) / 2

    found = _border_between(distances, compared)
    return NEAR if found is None else min(NEAR, int(found))


def _least_cosine(vectors: Array, compared: Sequence[tuple[Rows, Rows]]) -> float:
    """Return the cosine of near-duplicates."""
    found = _border_between(lambda i, j: 1 - products_of(vectors, i, vectors, j), compared)
    return LEAST if found is None else max(LEAST, 1 - found)


def _border_between(
    distances: Callable[[Rows, Rows], NDArray[np.floating]], compared: Sequence[tuple[Rows, Rows]]
) -> float | None:
    """Return the `border` of all pairs of rows that are compared."""
    sampled = []
    pairs = 0
    for one, other in compared:
        n = len(one)
        m = len(other)
        i, j = random_pairs(n, None if one is other else m)
        sampled.append(distances(one[i], other[j]))
        pairs += n * (n - 1) // 2 if one is other else n * m
    images = len(np.unique(np.concatenate([rows for both in compared for rows in both])))
    return border(np.concatenate(sampled), images, pairs)


def _near(
    one: Array, other: Array, least: float, compared: Sequence[tuple[Rows, Rows]]
) -> Iterator[tuple[int, int, float]]:
    """Yield the compared pairs of rows whose product is at least `least`, and the product."""
    for rows, others in compared:
        for i, j, product in near_rows(one[rows], other[others], least, within=rows is others):
            yield int(rows[i]), int(others[j]), product


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
            kept = best()
            cut = True
    return best(), cut or len(kept) > most


def linked_names(
    files: Sequence[tuple[Path, str] | None], splits: Sequence[str]
) -> dict[int, tuple[int, Kind]]:
    """Return the images whose file has another name, by position: that name's position, and how.

    The name that is no symbolic link is the other one, of several the first of its split, or
    without one there the first of all.

    Args:
        files: folder and name below it of each image; None of one inside another file.
    """
    by_file: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for number, file in enumerate(files):
        if file is not None:
            root, name = file
            status = (root / name).stat()
            is_link = os.path.realpath(root / name) != os.path.join(os.path.realpath(root), name)
            by_file.setdefault((status.st_dev, status.st_ino), []).append((is_link, number))
    found: dict[int, tuple[int, Kind]] = {}
    for names in by_file.values():
        firsts: dict[str, int] = {}
        for is_link, number in sorted(names):
            first = firsts.setdefault(splits[number], number)
            if first == number and len(firsts) > 1:
                first = next(iter(firsts.values()))
            if first != number:
                found[number] = first, "symbolic link" if is_link else "hard link"
    return found
