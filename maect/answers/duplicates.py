"""Find duplicates in a folder or across splits, by bytes, hashes or vectors; write the pairs."""

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.answers.alike import BITS, Found, Pair, SearchedImages, find_pairs, linked_names
from maect.answers.groups import SIDE, thumbnail
from maect.answers.vectors import Vectors, is_index, open_images, write_rows
from maect.core.errors import UserError, counted, reason
from maect.core.files import seek_record, write_json, write_text
from maect.core.log import progress
from maect.core.settings import validated
from maect.data.config import reused_shards
from maect.data.convert import decode
from maect.data.decode import UnreadableError
from maect.data.image_facts import Facts, merged, warning
from maect.data.index import SIZE, Index, open_index
from maect.data.shard_plan import image_names
from maect.data.sources.base import Entry, ImageSource, as_utf8, is_utf8
from maect.evaluate.base import encoder_checksum
from maect.evaluate.clustering import comparable, scale_of
from maect.evaluate.store import FeatureFile, open_features
from maect.recipes import Pixels
from maect.report.render import render_page, small_jpeg

log = logging.getLogger(__name__)

SHOWN = 200
"""Pairs on the page."""
COPIES = "copies.txt"
TRAIN = "train"
"""Split that images are left out of which another split has, too."""
_SIDE = 32
_FLAT = 2
_AT_ONCE = 256

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
class ReadImages:
    """Images that can be read, with hashes.

    Attributes:
        entries: of the images, by their names.
        left_out: how many cannot be read.
    """

    images: SearchedImages
    entries: dict[str, Entry]
    left_out: int


def read_images(source: ImageSource, pixels: Pixels, names: set[str] | None = None) -> ReadImages:
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

    report = progress(source.path, len(wanted))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            for entry, one in zip(part, pool.map(read, part), strict=True):
                if isinstance(one, str):
                    log.warning("%s: left out: %s", as_utf8(entry.name), one)
                else:
                    found.append((entry, one))
                    facts = merged([facts, one.facts]) if one.facts else facts
            report(start + len(part))
    if lost := warning(facts, pixels, option=True):
        log.warning("%s: %s", source.path, lost)
    shape = (len(found), BITS)
    entries = [entry for entry, _ in found]
    splits = [""] * len(entries)
    images = SearchedImages(
        [entry.name for entry in entries],
        [one.digest for _, one in found],
        splits,
        linked_names([file_of(source, entry) for entry in entries], splits),
        np.reshape([one.hash for _, one in found], shape),
        np.reshape([one.mirrored for _, one in found], shape),
    )
    left_out = len(wanted if names is None else names) - len(found)
    return ReadImages(images, {entry.name: entry for entry in entries}, left_out)


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
        return cls(hashlib.sha256(data).digest(), *hashes, seen.facts)


def groups_of(images: SearchedImages) -> list[int]:
    """Return the group of each image: equal files, links and near-duplicates are in one.

    So are images that are near to the same one, such as the frames of a scene.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(images.names)
    place = {name: i for i, name in enumerate(images.names)}
    found = find_pairs(images, n * n).pairs if n > 1 else []
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


def search_images(
    what: Path, out: Path, images: Path | None = None, read: Mapping[str, Any] | None = None
) -> tuple[Found, int]:
    """Search a folder or a table of vectors for duplicates; write them.

    Args:
        what: images, or a .parquet of `maect embed`.
        out: folder of the tables, the list of copies and the page.
        images: where the images of a .parquet are, if they have moved.
        read: how images are read, in place of how viewers show them (`Pixels.reading`).

    Returns:
        The pairs, and how many images cannot be read.

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
    searched = seen.images
    n = len(searched.names) - len(searched.links)
    if n < 2:
        raise UserError(f"{what}: {counted(n, 'readable image')}: two are needed to compare")
    if vectors is not None:
        position = {name: i for i, name in enumerate(vectors.files)}
        rows = comparable(vectors.values, scale_of(vectors.values))
        searched = replace(searched, vectors=rows[[position[name] for name in searched.names]])
    found = find_pairs(searched)
    behind_links = {pair.a for pair in found.pairs if pair.kind.endswith("link")}
    copies = [p.b for p in found.pairs if p.kind == "equal" and p.b not in behind_links]
    write_pairs(
        out,
        found,
        lambda _, name: thumbnail(source, seen.entries[name], pixels),
        {COPIES: copies},
        where=counted(n, "image"),
    )
    return found, seen.left_out


def write_pairs(
    out: Path,
    found: Found,
    picture: Callable[[str, str], str],
    exclude: Mapping[str, Sequence[str]],
    where: str,
    encoder: str = "",
) -> None:
    """Write all pairs as `pairs.json` and `pairs.csv`, and a page of the first `SHOWN`.

    Args:
        picture: of a split and a name there: the image as a data URI.
        exclude: lists of images to leave out of a training, by the name of the file; an empty one
            is removed.
        where: the images are from, in words for the page.
        encoder: name of that of the vectors, likewise.
    """
    for name, images in exclude.items():
        if images:
            write_text(out / name, "".join(f"{image}\n" for image in images))
        else:
            (out / name).unlink(missing_ok=True)
    rows = found.rows
    write_json(out / "pairs.json", rows)
    header = [field.name for field in fields(Pair)]
    write_rows(out / "pairs.csv", header, ([*row.values()] for row in rows))
    shown = [
        row | {"pictures": (picture(row["split_a"], row["a"]), picture(row["split_b"], row["b"]))}
        for row in rows[:SHOWN]
    ]
    page = render_page(
        "pairs.html",
        pairs=shown,
        found=found,
        exclude={name: len(images) for name, images in exclude.items() if images},
        where=where,
        encoder=encoder,
    )
    write_text(out / "index.html", page)


@dataclass(frozen=True)
class SearchedSplit:
    """A split's shards and the features of its images, in one order."""

    name: str
    index: Index
    features: FeatureFile


def open_splits(run: Path, dataset: str | None = None) -> list[SearchedSplit]:
    """Return the splits of a data set for which a run's features exist, by name.

    A UserError if they are fewer than two, of several data sets, other images or another encoder.
    """
    root = run.absolute().parents[1]
    splits: dict[str, dict[str, SearchedSplit]] = defaultdict(dict)
    for own in sorted(root.glob("shards/*/*")):
        name = own.parent.name
        split = own.name
        # In its folder, or in another experiment's.
        shards = own if (own / "index.json").exists() else reused_shards(own)
        file = root / "features" / run.name / f"{name}-{split}.safetensors"
        if file.exists() and shards is not None and dataset in (None, name):
            index = open_index(shards)
            features = open_features(file)
            if features.record["index_digest"] != index.digest:
                raise UserError(f"{file}: made of other images than {shards}; delete it")
            if features.record["encoder_sha256"] != encoder_checksum(run):
                raise UserError(f"{file}: made with another encoder than {run} has; delete it")
            splits[name][split] = SearchedSplit(split, index, features)
    if len(splits) > 1:
        raise UserError(f"{run}: features of {', '.join(splits)}; choose one with --dataset")
    found = next(iter(splits.values()), {})
    if len(found) < 2:
        raise UserError(
            f"{run}: two splits with features in {root / 'features' / run.name} and shards in "
            f"{root / 'shards'} are needed, and there is {', '.join(found) or 'none'}; maect "
            "features makes features of a split, maect run lost shards"
        )
    return list(found.values())


def search_splits(run: Path, out: Path, dataset: str | None = None) -> tuple[Found, dict[str, str]]:
    """Search the splits of a data set for images that two of them have; write these.

    Args:
        run: whose features are compared.
        out: folder of the tables, the lists to leave images out by, and the page.
        dataset: to search, if the run has features of several.

    Returns:
        The pairs, and the digest of each split's images.
    """
    from maect.evaluate.pictures import pictures  # it imports torch

    splits = open_splits(run, dataset)
    index_of = {split.name: split.index for split in splits}
    names_of = {name: image_names(index) for name, index in index_of.items()}
    rows_of = {name: {key: i for i, key in enumerate(names)} for name, names in names_of.items()}
    files = [file for name, index in index_of.items() for file in _files(index, names_of[name])]
    of_split = [name for name, names in names_of.items() for _ in names]
    features = np.concatenate([split.features.values for split in splits])
    images = SearchedImages(
        [*chain(*names_of.values())],
        _digests(splits),
        of_split,
        linked_names(files, of_split),
        vectors=comparable(features, scale_of(features)),
    )
    found = find_pairs(images)

    def picture(split: str, name: str) -> str:
        row = np.array([rows_of[split][name]])
        (square,) = pictures(index_of[split], row, SIDE, SIDE)
        return small_jpeg(Image.fromarray(square), SIDE)

    excluded = _excluded(found.pairs)
    write_pairs(
        out,
        found,
        picture,
        {f"exclude-{name}.txt": sorted(excluded[name]) for name in index_of},
        where=" and ".join(
            f"{name} ({counted(index.n, 'image')})" for name, index in index_of.items()
        ),
        encoder=run.name,
    )
    return found, {name: index.digest for name, index in index_of.items()}


def _files(index: Index, names: list[str]) -> list[tuple[Path, str] | None]:
    """Return the folder and name of the file that each image was sharded from, if it is there."""
    plan = seek_record(index.directory / "plan.json")
    if "source" not in plan:
        return [None] * len(names)
    folder = Path(plan["source"])
    return [(folder, name) if (folder / name).is_file() else None for name in names]


def _digests(splits: list[SearchedSplit]) -> list[bytes | None]:
    """Return the SHA-256 of each image; None of one whose size no other has: it is not read."""
    sizes = np.concatenate([split.index.rows[:, SIZE] for split in splits])
    _, position, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    recurs = counts[position] > 1
    digests: list[bytes | None] = []
    for split in splits:
        for row in range(split.index.n):
            if recurs[len(digests)]:
                digests.append(hashlib.sha256(split.index.read(row)).digest())
            else:
                digests.append(None)
    return digests


def _excluded(pairs: list[Pair]) -> dict[str, set[str]]:
    """Return the images to leave out of each split so that no pair is left; of a pair one stays.

    The training image goes, or without a split of this name the first's.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        ends = (pair.split_a, pair.a), (pair.split_b, pair.b)
        if not any(name in found[split] for split, name in ends):
            split, name = ends[1] if pair.split_b == TRAIN else ends[0]
            found[split].add(name)
    return found
