"""Images that are there twice, or nearly: by bytes, by a perceptual hash, by vectors."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.answers.alike import BITS, Found, SearchedImages, find_pairs, linked_names
from maect.answers.vectors import Vectors, is_index, open_images, thumbnail, write_rows
from maect.core.errors import UserError, counted, reason
from maect.core.files import write_json, write_text
from maect.core.settings import validated
from maect.data.convert import decode
from maect.data.decode import UnreadableError
from maect.data.image_facts import Facts, facts_of, merged, warning
from maect.data.sources.base import Entry, ImageSource, as_utf8, is_utf8
from maect.evaluate.clusters import comparable, scale_of
from maect.recipes import Pixels
from maect.report.render import render_page

log = logging.getLogger(__name__)

COUNT = 50
SHOWN = 200
"""Pairs on the page."""
COPIES = "copies.txt"
_SIDE = 32
_FLAT = 2
_AT_ONCE = 256
_EVERY = 10.0
"""Seconds between messages of how far it is."""

Array = NDArray[np.float32]


def perceptual_hash(image: Image.Image) -> Array:
    """Return the signs of an image's lowest 8 x 8 frequencies at 32 x 32 grey pixels, [64] of ±1.

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
    shape = (len(found), BITS)
    entries = [entry for entry, _ in found]
    left_out = len(wanted if names is None else names) - len(found)
    return Hashed(
        entries,
        [one.digest for _, one in found],
        np.reshape([one.hash for _, one in found], shape),
        np.reshape([one.mirrored for _, one in found], shape),
        linked_names([file_of(source, entry) for entry in entries], [""] * len(entries)),
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
        seen = decode(data, pixels)
        values = seen.pixels
        if values.shape[2:] not in ((), (3,)):
            values = np.ascontiguousarray(values[..., 0])
        picture = Image.fromarray(values)
        mirrored = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        hashes = perceptual_hash(picture), perceptual_hash(mirrored)
        return cls(hashlib.sha256(data).digest(), *hashes, facts_of(seen))


def images_of(seen: Hashed, vectors: Vectors | None = None) -> SearchedImages:
    """Return the images of a folder, to be searched for pairs.

    Args:
        vectors: of the same images; None: hashes alone.
    """
    names = [entry.name for entry in seen.entries]
    rows = None
    if vectors is not None:
        position = {name: i for i, name in enumerate(vectors.files)}
        rows = comparable(vectors.values, scale_of(vectors.values))
        rows = rows[[position[name] for name in names]]
    splits = [""] * len(names)
    return SearchedImages(names, seen.digests, splits, seen.links, seen.hashes, seen.mirrored, rows)


def groups_of(seen: Hashed) -> list[int]:
    """Return the group of each image: equal files, links and near-duplicates are in one.

    So are images that are near to the same one, such as the frames of a scene.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(seen.entries)
    place = {entry.name: i for i, entry in enumerate(seen.entries)}
    found = find_pairs(images_of(seen), most=n * n).pairs if n > 1 else []
    pairs = [(place[pair.a], place[pair.b]) for pair in found]
    ends = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), (n, n))
    groups: list[int] = connected_components(graph, directed=False)[1].tolist()
    return groups


def file_of(source: ImageSource, entry: Entry) -> tuple[Path, str] | None:
    """Return folder and name of an image's file; None if it is inside another file, or gone."""
    inside = entry.offset >= 0 or source.file_of(entry) != entry.path
    if inside or not (source.root / entry.path).is_file():
        return None
    return source.root, entry.path


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
        source = open_images(what)[0]
        pixels = Pixels()
        names = None
    else:
        source = vectors.source(images)
        pixels = vectors.pixels
        names = set(vectors.files)
    # As people see them: a phone's picture lies on its side, and its upright copy does not.
    pixels = validated(Pixels, pixels.as_seen.model_dump() | dict(read or {}), "pixels")
    seen = read_images(source, pixels, names)
    count_read = len(seen.entries) - len(seen.links)
    if count_read < 2:
        linked = f" ({len(seen.links)} more are links to them)" if seen.links else ""
        said = counted(count_read, "readable image")
        raise UserError(f"{said}{linked}: two are needed to compare")
    found = find_pairs(images_of(seen, vectors), count)
    header = ["a", "b", "exact", "link", "near", "bits"]
    header += [] if vectors is None else ["similarity"]
    behind_links = {pair.a for pair in found.pairs if pair.link}
    copies = [pair.b for pair in found.pairs if pair.exact and pair.b not in behind_links]
    write_text(out / COPIES, "".join(f"{name}\n" for name in copies))
    entries = {entry.name: entry for entry in seen.entries}
    write_pairs(
        out,
        found,
        header,
        lambda _, name: thumbnail(source, entries[name], pixels),
        where=counted(count_read, "image"),
        exclude={COPIES: len(copies)} if copies else {},
        encoder="",
    )
    links = found.count("link")
    linked = f", {counted(links, 'link')} to one of them" if links else ""
    more = "; only the most alike near-duplicates are listed" if found.cut else ""
    return (
        f"{counted(count_read, 'image')}{linked}, {seen.left_out} left out: "
        f"{counted(found.count('exact'), 'pair')} of equal files, "
        f"{counted(found.count('near'), 'pair')} of near-duplicates, "
        f"{found.count('other')} others that are most alike{more}"
    )


def write_pairs(
    out: Path,
    found: Found,
    header: Sequence[str],
    picture: Callable[[str, str], str],
    **about: Any,
) -> list[dict[str, Any]]:
    """Write all pairs as `pairs.json` and `pairs.csv`, and a page of the first `SHOWN`.

    Args:
        header: fields of a `Pair` to write.
        picture: of a split and a name there: the image as a data URI.
        **about: what else the page says: `where` the images are from, `exclude` (lists of images
            to leave out, with their lengths), `encoder` of the vectors.

    Returns:
        The pairs, as they are written.
    """
    plain = [{key: getattr(pair, key) for key in header} for pair in found.pairs]
    write_json(out / "pairs.json", plain)
    rows = ([_cell(value) for value in pair.values()] for pair in plain)
    write_rows(out / "pairs.csv", list(header), rows)
    shown = []
    for pair, values in zip(found.pairs[:SHOWN], plain, strict=False):
        both = picture(pair.split_a, pair.a), picture(pair.split_b, pair.b)
        shown.append(values | {"near": pair.near, "pictures": both})
    counts = {kind: found.count(kind) for kind in ("exact", "near", "other", "link")}
    about |= counts | {
        "bits": found.bits, "similarity": found.similarity, "cut": found.cut,
        "shown": len(shown), "pairs": len(plain),
    }  # fmt: skip
    write_text(out / "index.html", render_page("pairs.html", pairs=shown, about=about))
    return plain


def _cell(value: object) -> str:
    """Return a value as it stands in a CSV file."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
