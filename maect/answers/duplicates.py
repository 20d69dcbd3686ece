"""Images that are there twice, or nearly: by bytes, by a perceptual hash, by vectors."""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.answers import alike
from maect.answers.alike import border, most_of, near_rows, products_of, random_pairs
from maect.answers.vectors import Vectors, is_index, open_images, thumbnail, write_rows
from maect.core.errors import UserError, counted, reason
from maect.core.files import write_json, write_text
from maect.core.settings import validated
from maect.data.convert import see
from maect.data.decode import UnreadableError
from maect.data.image_facts import Facts, facts_of, merged, warning
from maect.data.sources.base import Entry, ImageSource, as_utf8, is_utf8
from maect.evaluate.clusters import comparable, scale_of
from maect.recipes import Pixels
from maect.report.render import render_page

log = logging.getLogger(__name__)

COUNT = 50
BITS = 64
NEAR = 10
"""Bits of a hash in which two pictures of the same thing may differ, if other pictures do not."""
LEAST = 0.95
"""Cosine of the vectors of near-duplicates, or more if random pairs ask for more."""
SHOWN = 200
"""Pairs on the page."""
COPIES = "copies.txt"
_SIDE, _FLAT = 32, 2
_ROWS = 4096
_AT_ONCE = 256
_EVERY = 10.0
"""Seconds between messages of how far it is."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Alike:
    """Two images that are alike.

    Attributes:
        exact: whether they are two files that are equal, byte for byte.
        link: how the second is another name of the first's file, which is no copy; else "".
        near: whether they are more alike than random pairs of these images.
        bits: of 64 in which their perceptual hashes differ, the second as it is or mirrored.
        similarity: of their vectors, as `maect search` prints it; None without vectors.
    """

    a: str
    b: str
    exact: bool
    link: str
    near: bool
    bits: int
    similarity: float | None = None


@dataclass(frozen=True)
class Found:
    """The pairs of a folder, and from where on two images are near-duplicates.

    Attributes:
        pairs: equal files, near-duplicates, the most alike of the others, links.
        bits: of 64 in which near-duplicates differ at most; below 0: hashes tell nothing here.
        similarity: of near-duplicates' vectors, at least; None without vectors.
        cut: whether there are more near-duplicates than are listed.
    """

    pairs: list[Alike]
    bits: int
    similarity: float | None
    cut: bool

    def count(self, kind: str) -> int:
        """Return how many pairs are `exact`, `near`, `link`, or `other`."""
        kinds = [
            "link" if p.link else "exact" if p.exact else "near" if p.near else "other"
            for p in self.pairs
        ]
        return kinds.count(kind)


def perceptual_hash(image: Image.Image) -> Array:
    """The signs of the lowest 8 x 8 frequencies of an image in 32 x 32 grey pixels, [64] of ±1.

    As pHash (Zauner 2010, section 3.2): a discrete cosine transform, each frequency
    compared with the median of all. Sizes, compression and brightness hardly change it. A picture
    of one colour has no signs: zeros, which are unlike any hash.
    """
    from scipy.fft import dctn

    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), float)
    if np.ptp(grey) < _FLAT:
        return np.zeros(BITS, np.float32)
    low = dctn(grey, norm="ortho")[:8, :8].ravel()
    return np.where(low > np.median(low), 1, -1).astype(np.float32)


@dataclass(frozen=True)
class Hashed:
    """Images that can be read, with SHA-256 and hashes (±1, float32 [n, 64]), also mirrored.

    Attributes:
        links: images that are another name of a file, by position: the first name's, and how.
        left_out: how many cannot be read.
    """

    entries: list[Entry]
    digests: list[bytes]
    hashes: Array
    mirrored: Array
    links: dict[int, tuple[int, str]] = field(default_factory=dict)
    left_out: int = 0


def read_images(source: ImageSource, pixels: Pixels, names: set[str] | None = None) -> Hashed:
    """Read each image once, or those of some names; one that cannot be read is left out, named."""
    wanted = [e for e in source.listing().entries if names is None or e.name in names]
    found: list[tuple[Entry, _Read]] = []
    facts: Facts = {}

    def read(entry: Entry) -> _Read | str:
        try:
            if not is_utf8(entry.name):
                raise UnreadableError("its name is not UTF-8")
            return _Read.of(source.read(entry), pixels)
        except (UnreadableError, OSError) as error:
            return reason(error)

    said = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            for entry, one in zip(part, pool.map(read, part), strict=True):
                if isinstance(one, str):
                    log.warning("%s: left out: %s", as_utf8(entry.name), one)
                else:
                    found.append((entry, one))
                    facts = merged([facts, one.facts]) if one.facts else facts
            if time.monotonic() - said > _EVERY:
                said = time.monotonic()
                log.info("%s: %d of %d images", source.path, start + len(part), len(wanted))
    if lost := warning(facts, pixels, option=True):
        log.warning("%s: %s", source.path, lost)
    shape, entries = (len(found), BITS), [entry for entry, _ in found]
    left_out = len(wanted if names is None else names) - len(found)
    return Hashed(
        entries,
        [one.digest for _, one in found],
        np.reshape([one.hash for _, one in found], shape),
        np.reshape([one.mirrored for _, one in found], shape),
        alike.linked_names(source, entries),
        left_out,
    )


@dataclass(frozen=True)
class _Read:
    """SHA-256 of an image's bytes, its hashes, and facts about it."""

    digest: bytes
    hash: Array
    mirrored: Array
    facts: Facts

    @classmethod
    def of(cls, data: bytes, pixels: Pixels) -> "_Read":
        """Decode an image; of rare channels the first is hashed."""
        seen = see(data, pixels)
        values = seen.pixels
        if values.shape[2:] not in ((), (3,)):
            values = np.ascontiguousarray(values[..., 0])
        picture = Image.fromarray(values)
        mirrored = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        hashes = perceptual_hash(picture), perceptual_hash(mirrored)
        return cls(hashlib.sha256(data).digest(), *hashes, facts_of(seen))


def near_bits(hashes: Array, mirrored: Array) -> int:
    """Return in how many bits near-duplicates among these images differ at most."""
    n = len(hashes)
    i, j = random_pairs(n)
    both = (products_of(hashes, i, other, j) for other in (hashes, mirrored))
    products = np.maximum(*both)
    found = border((BITS - products) / 2, n, n * (n - 1) // 2)
    return NEAR if found is None else min(NEAR, int(found))


def near_by_hash(hashes: Array, mirrored: Array, bits: int) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs of images whose hashes differ in so many bits at most, and the product."""
    for other in (hashes, mirrored):
        yield from near_rows(hashes, other, BITS - 2 * bits, within=True)


def groups_of(seen: Hashed) -> list[int]:
    """Return the group of each image: equal files, links and near-duplicates are in one.

    So are images that are near to the same one, such as the frames of a scene.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(seen.entries)
    first: dict[bytes, int] = {}
    pairs = [(first.setdefault(digest, i), i) for i, digest in enumerate(seen.digests)]
    kept = np.array(sorted(first.values()), np.int64)
    hashes, mirrored = seen.hashes[kept], seen.mirrored[kept]
    near = near_by_hash(hashes, mirrored, near_bits(hashes, mirrored))
    pairs += [(int(kept[i]), int(kept[j])) for i, j, _ in near]
    ends = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), (n, n))
    groups: list[int] = connected_components(graph, directed=False)[1].tolist()
    return groups


def find_alike(seen: Hashed, vectors: Vectors | None = None, count: int = COUNT) -> Found:
    """Find equal files, near-duplicates, and the pairs that are most alike beside these.

    Args:
        vectors: of the same images; None: hashes alone.
        count: pairs to return that are neither equal nor near.

    Raises:
        UserError: fewer than two images.
    """
    names = [entry.name for entry in seen.entries]
    files = [i for i in range(len(names)) if i not in seen.links]
    if len(files) < 2:
        linked = f" ({len(seen.links)} more are links to them)" if seen.links else ""
        said = counted(len(files), "readable image")
        raise UserError(f"{said}{linked}: two are needed to compare")
    first: dict[bytes, int] = {}
    linked_to = {i for i, _ in seen.links.values()}
    # The file behind a link comes first: the others can go without breaking it.
    in_order = sorted(files, key=lambda i: (i not in linked_to, i))
    exact = [(first.setdefault(seen.digests[i], i), i) for i in in_order]
    exact = sorted((i, j) for i, j in exact if i != j)
    kept = np.array(sorted(first.values()))  # of equal files one is compared with the others
    hashes, mirrored = seen.hashes[kept], seen.mirrored[kept]
    rows = None if vectors is None else _rows(vectors, names)

    def pair(i: int, j: int, same: bool = False, link: str = "", near: bool = False) -> Alike:
        most = max(seen.hashes[i] @ seen.hashes[j], seen.hashes[i] @ seen.mirrored[j])
        similarity = None if rows is None else min(1.0, float(rows[i] @ rows[j]))
        return Alike(names[i], names[j], same, link, near, int((BITS - most) / 2), similarity)

    bits = near_bits(hashes, mirrored)
    candidates, similarity = near_by_hash(hashes, mirrored, bits), None
    if rows is not None:
        own, n = rows[kept], len(kept)
        i, j = random_pairs(n)
        found = border(1 - products_of(own, i, own, j), n, n * (n - 1) // 2)
        similarity = LEAST if found is None else max(LEAST, 1 - found)
        by_vector = near_rows(own, own, similarity, within=True)
        candidates = chain(candidates, ((i, j, BITS * product) for i, j, product in by_vector))
    near, cut = most_of(candidates)
    more = count + len(near)
    if rows is None:
        others = {*most_alike(hashes, hashes, more), *most_alike(hashes, mirrored, more)}
    else:
        others = {*most_alike(own, own, more)}
    listed = [pair(int(kept[i]), int(kept[j]), near=True) for i, j in near]
    rest = [pair(int(kept[i]), int(kept[j])) for i, j in others - near.keys()]
    for part in (listed, rest):
        part.sort(key=lambda p: (p.bits > bits, -(p.similarity or 0.0), p.bits, p.a, p.b))
    equal = [pair(i, j, same=True) for i, j in exact]
    links = [pair(i, j, link=how) for j, (i, how) in sorted(seen.links.items())]
    return Found([*equal, *listed, *rest[:count], *links], bits, similarity, cut)


def _rows(vectors: Vectors, names: list[str]) -> Array:
    at = {name: i for i, name in enumerate(vectors.files)}
    rows = comparable(vectors.values, scale_of(vectors.values))
    return rows[[at[name] for name in names]]


def most_alike(one: Array, other: Array, count: int) -> list[tuple[int, int]]:
    """Positions of the pairs of rows [n, width] with the largest products, the first smaller."""
    best, pairs = np.empty(0, np.float32), np.empty((0, 2), np.int64)
    for start in range(0, len(one), _ROWS):
        for begin in range(start, len(other), _ROWS):
            products = one[start : start + _ROWS] @ other[begin : begin + _ROWS].T
            if begin == start:
                products[np.tril_indices(len(products), 0, products.shape[1])] = -np.inf
            flat = products.ravel()
            top = np.argpartition(-flat, min(count, flat.size) - 1)[:count]
            top = top[np.isfinite(flat[top])]
            rows, columns = np.divmod(top, products.shape[1])
            both = np.stack([start + rows, begin + columns], axis=1)
            best, pairs = np.concatenate([best, flat[top]]), np.concatenate([pairs, both])
            order = np.argsort(-best, kind="stable")[:count]
            best, pairs = best[order], pairs[order]
    return [(int(i), int(j)) for i, j in pairs]


def duplicates(
    what: Path,
    out: Path,
    images: Path | None = None,
    count: int = COUNT,
    read: Mapping[str, Any] | None = None,
) -> str:
    """Write tables, a list of copies and a page, and return how many there are, in words.

    Args:
        read: how images are read, in place of how viewers show them (`Pixels.reading`).

    Raises:
        UserError: images that are not there, or fewer than two that can be read.
    """
    vectors = Vectors.read(what) if is_index(what) else None
    if vectors is None:
        source, pixels, names = open_images(what)[0], Pixels(), None
    else:
        source, pixels, names = vectors.source(images), vectors.pixels, set(vectors.files)
    # As people see them: a phone's picture lies on its side, and its upright copy does not.
    pixels = validated(Pixels, pixels.as_seen.model_dump() | dict(read or {}), "pixels")
    seen = read_images(source, pixels, names)
    found = find_alike(seen, vectors, count)
    header = ["a", "b", "exact", "link", "near", "bits"]
    header += [] if vectors is None else ["similarity"]
    plain = [{key: getattr(pair, key) for key in header} for pair in found.pairs]
    write_json(out / "pairs.json", plain)
    write_rows(out / "pairs.csv", header, ([*pair.values()] for pair in plain))
    behind_links = {pair.a for pair in found.pairs if pair.link}
    copies = [pair.b for pair in found.pairs if pair.exact and pair.b not in behind_links]
    write_text(out / COPIES, "".join(f"{name}\n" for name in copies))
    entries = {entry.name: entry for entry in seen.entries}
    shown = [
        {**pair, "pictures": [thumbnail(source, entries[pair[x]], pixels) for x in "ab"]}
        for pair in plain[:SHOWN]
    ]
    counts = {kind: found.count(kind) for kind in ("exact", "near", "other", "link")}
    count_read = len(seen.entries) - len(seen.links)
    about = {
        **counts, "images": count_read, "bits": found.bits,
        "similarity": found.similarity, "cut": found.cut, "shown": len(shown),
        "pairs": len(plain), "copies": COPIES,
    }  # fmt: skip
    write_text(out / "index.html", render_page("duplicates.html", pairs=shown, about=about))
    linked = f", {counted(counts['link'], 'link')} to one of them" if counts["link"] else ""
    more = "; only the most alike near-duplicates are listed" if found.cut else ""
    return (
        f"{counted(count_read, 'image')}{linked}, {seen.left_out} left out: "
        f"{counted(counts['exact'], 'pair')} of equal files, "
        f"{counted(counts['near'], 'pair')} of near-duplicates, "
        f"{counts['other']} others that are most alike{more}"
    )
