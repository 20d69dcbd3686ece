"""Images that are there twice, or nearly: by bytes, by a perceptual hash, by vectors."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.answers.vectors import Vectors, is_index, open_images, thumbnail, write_rows
from maect.core.errors import UserError, counted, reason
from maect.core.files import write_json, write_text
from maect.data.convert import picture_of
from maect.data.decode import UnreadableError
from maect.data.sources.base import Entry, ImageSource, as_utf8, is_utf8
from maect.evaluate.clusters import comparable, scale_of
from maect.recipes import Pixels
from maect.report.render import render_page

log = logging.getLogger(__name__)

COUNT = 50
BITS = 64
NEAR = 10
"""Bits of a hash in which two pictures of the same thing may differ."""
SHOWN = 200
"""Pairs on the page."""
_SIDE = 32
_ROWS = 4096

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Alike:
    """Two images that are alike.

    Attributes:
        exact: whether their files are equal, byte for byte.
        bits: of 64 in which their perceptual hashes differ, the second as it is or mirrored.
        similarity: of their vectors, as `maect search` prints it; None without vectors.
    """

    a: str
    b: str
    exact: bool
    bits: int
    similarity: float | None = None


def perceptual_hash(image: Image.Image) -> Array:
    """The signs of the lowest 8 x 8 frequencies of an image in 32 x 32 grey pixels, [64] of ±1.

    As pHash (Zauner 2010, section 3.2): a discrete cosine transform, each frequency
    compared with the median of all. Sizes, compression and brightness hardly change it.
    """
    from scipy.fft import dctn

    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), float)
    low = dctn(grey, norm="ortho")[:8, :8].ravel()
    return np.where(low > np.median(low), 1, -1).astype(np.float32)


@dataclass(frozen=True)
class Seen:
    """Images that can be read, with SHA-256 and hashes (±1, float32 [n, 64]), also mirrored.

    Attributes:
        left_out: how many cannot.
    """

    entries: list[Entry]
    digests: list[bytes]
    hashes: Array
    mirrored: Array
    left_out: int = 0


def read_images(source: ImageSource, pixels: Pixels, names: set[str] | None = None) -> Seen:
    """Read each image once, or those of some names; one that cannot be read is left out, named."""
    entries, digests, hashes, mirrored = [], [], [], []
    wanted = [e for e in source.listing().entries if names is None or e.name in names]
    for entry in wanted:
        try:
            if not is_utf8(entry.name):
                raise UnreadableError("its name is not UTF-8")
            data = source.read(entry)
            picture = picture_of(data, pixels)
        except (UnreadableError, OSError) as error:
            log.warning("%s: left out: %s", as_utf8(entry.name), reason(error))
            continue
        entries.append(entry)
        digests.append(hashlib.sha256(data).digest())
        hashes.append(perceptual_hash(picture))
        mirrored.append(perceptual_hash(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    shape = len(entries), BITS
    left_out = len(wanted if names is None else names) - len(entries)
    return Seen(entries, digests, np.reshape(hashes, shape), np.reshape(mirrored, shape), left_out)


def find_alike(seen: Seen, vectors: Vectors | None = None, count: int = COUNT) -> list[Alike]:
    """The pairs that are most alike: equal files, then by hash, then by vectors.

    Args:
        vectors: of the same images; None: hashes alone.
        count: of pairs at most, beside those of equal files.

    Raises:
        UserError: fewer than two images.
    """
    names = [entry.name for entry in seen.entries]
    if len(names) < 2:
        raise UserError(f"{counted(len(names), 'readable image')}: two are needed to compare")
    first: dict[bytes, int] = {}
    exact = [(first.setdefault(digest, i), i) for i, digest in enumerate(seen.digests)]
    exact = [(i, j) for i, j in exact if i != j]
    kept = np.array(sorted(first.values()))  # of equal files one is compared with the others
    rows = None if vectors is None else _rows(vectors, names)

    def bits(i: int, j: int) -> int:
        most = max(seen.hashes[i] @ seen.hashes[j], seen.hashes[i] @ seen.mirrored[j])
        return int((BITS - most) / 2)

    hashes = seen.hashes[kept]
    found = [*most_alike(hashes, hashes, count), *most_alike(hashes, seen.mirrored[kept], count)]
    if rows is not None:
        found = [pair for pair in found if bits(*kept[list(pair)]) <= NEAR]
        found += most_alike(rows[kept], rows[kept], count)
    others = {(int(kept[i]), int(kept[j])) for i, j in found}

    def alike(i: int, j: int, same: bool) -> Alike:
        similarity = None if rows is None else min(1.0, float(rows[i] @ rows[j]))
        return Alike(names[i], names[j], same, bits(i, j), similarity)

    pairs = [alike(i, j, False) for i, j in others]
    pairs.sort(key=lambda p: (p.bits > NEAR, -(p.similarity or 0.0), p.bits, p.a, p.b))
    return [alike(i, j, True) for i, j in exact] + pairs[:count]


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


def duplicates(what: Path, out: Path, images: Path | None = None, count: int = COUNT) -> str:
    """Write `pairs.csv`, `pairs.json` and `index.html`, and return how many there are, in words.

    Raises:
        UserError: images that are not there, or fewer than two that can be read.
    """
    vectors = Vectors.read(what) if is_index(what) else None
    if vectors is None:
        source, pixels, names = open_images(what)[0], Pixels(), None
    else:
        source, pixels, names = vectors.source(images), vectors.pixels, set(vectors.files)
    # As people see them: a phone's picture lies on its side, and its upright copy does not.
    pixels = pixels.model_copy(update={"orientation": "exif"})
    seen = read_images(source, pixels, names)
    pairs = find_alike(seen, vectors, count)
    header = ["a", "b", "exact", "bits", *([] if vectors is None else ["similarity"])]
    plain = [{key: getattr(pair, key) for key in header} for pair in pairs]
    write_json(out / "pairs.json", plain)
    write_rows(out / "pairs.csv", header, ([*pair.values()] for pair in plain))
    entries = {entry.name: entry for entry in seen.entries}
    shown = [
        {**pair, "pictures": [thumbnail(source, entries[pair[x]], pixels) for x in "ab"]}
        for pair in plain[:SHOWN]
    ]
    exact = sum(pair.exact for pair in pairs)
    about = {"images": len(seen.entries), "exact": exact, "others": len(pairs) - exact}
    write_text(out / "index.html", render_page("duplicates.html", pairs=shown, about=about))
    equal = counted(exact, "pair") + " of equal files"
    read = f"{counted(len(seen.entries), 'image')}, {seen.left_out} left out"
    return f"{read}: {equal}, {len(pairs) - exact} others"
