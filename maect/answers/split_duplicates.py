"""Find images that two splits of a data set have, by bytes and by a run's features."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from maect.answers.alike import Found, Pair, SearchedImages, find_pairs, linked_names
from maect.answers.duplicates import write_pairs
from maect.answers.vectors import jpeg_uri
from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.data.config import reused_shards
from maect.data.index import SIZE, Index, open_index
from maect.data.shard_plan import image_names
from maect.evaluate.base import encoder_checksum
from maect.evaluate.clusters import comparable, scale_of
from maect.evaluate.retrieval import pictures
from maect.evaluate.store import FeatureFile, open_features

TRAIN = "train"
"""Split that images are left out of which another split has, too."""
_THUMBNAIL = 128


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
    splits = open_splits(run, dataset)
    index_of = {split.name: split.index for split in splits}
    names_of = {name: image_names(index) for name, index in index_of.items()}
    rows_of = {name: {key: i for i, key in enumerate(names)} for name, names in names_of.items()}
    files = [file for name, index in index_of.items() for file in _files(index, names_of[name])]
    of_split = [name for name, names in names_of.items() for _ in names]
    features = np.concatenate([split.features.all() for split in splits])
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
        (square,) = pictures(index_of[split], row, _THUMBNAIL, _THUMBNAIL)
        return jpeg_uri(Image.fromarray(square))

    excluded = _excluded(found.pairs)
    write_pairs(
        out,
        found,
        picture,
        {f"exclude-{name}.txt": sorted(excluded[name]) for name in index_of},
        where=" and ".join(f"{name} ({index.n:,} images)" for name, index in index_of.items()),
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
