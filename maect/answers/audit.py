"""Find duplicate images across the splits of a data set, by bytes and by a run's features."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maect.answers.alike import Found, Pair, SearchedImages, find_pairs, linked_names
from maect.answers.duplicates import write_pairs
from maect.answers.vectors import jpeg_uri
from maect.core.errors import UserError
from maect.core.files import seek_record, write_text
from maect.data.config import reused_shards
from maect.data.index import SIZE, Index, open_index
from maect.data.shard_plan import image_names
from maect.evaluate.base import encoder_checksum
from maect.evaluate.clusters import comparable, scale_of
from maect.evaluate.retrieval import pictures
from maect.evaluate.store import FeatureFile, open_features

TRAIN = "train"
"""Split that images are left out of which another split has, too."""
HEADER = ("a", "b", "split_a", "split_b", "similarity", "exact", "link")
_THUMBNAIL = 128


@dataclass(frozen=True)
class AuditedSplit:
    """A split's shards and the features of its images, in one order."""

    name: str
    index: Index
    features: FeatureFile


def open_splits(run: Path, dataset: str | None = None) -> list[AuditedSplit]:
    """Return the splits of a data set for which a run's features exist, by name.

    A UserError if they are fewer than two, of several data sets, other images or another encoder.
    """
    root = run.absolute().parents[1]
    folder = run.name
    splits: dict[str, dict[str, AuditedSplit]] = defaultdict(dict)
    for own in sorted(root.glob("shards/*/*")):
        name = own.parent.name
        split = own.name
        # In its folder, or in another experiment's.
        shards = own if (own / "index.json").exists() else reused_shards(own)
        file = root / "features" / folder / f"{name}-{split}.safetensors"
        if file.exists() and shards is not None and dataset in (None, name):
            index = open_index(shards)
            features = open_features(file)
            if features.record["index_digest"] != index.digest:
                raise UserError(f"{file}: made of other images than {shards}; delete it")
            if features.record["encoder_sha256"] != encoder_checksum(run):
                raise UserError(f"{file}: made with another encoder than {run} has; delete it")
            splits[name][split] = AuditedSplit(split, index, features)
    if len(splits) > 1:
        raise UserError(f"{run}: features of {', '.join(splits)}; choose one with --dataset")
    found = next(iter(splits.values()), {})
    if len(found) < 2:
        where = root / "features" / folder
        made = {file.stem for file in where.glob("*.safetensors")}
        known = {f"{name}-{split}" for name, of in splits.items() for split in of}
        start = f"{dataset}-" if dataset else ""
        if lost := sorted(stem for stem in made - known if stem.startswith(start)):
            raise UserError(
                f"{where}: the shards of {' and '.join(lost)} are not in {root / 'shards'}; "
                "maect run makes them again"
            )
        raise UserError(
            f"{where}: features of {', '.join(found) or 'no'} split alone, so nothing can be "
            f"compared; make others: maect features {run} --shards "
            f"{root}/shards/DATASET/SPLIT --out {where}/DATASET-SPLIT.safetensors"
        )
    return list(found.values())


def audit(
    splits: list[AuditedSplit], threshold: float | None = None, within: bool = False
) -> Found:
    """Find pairs of images in the splits of a data set: equal files, links, near-duplicates.

    Args:
        threshold: smallest cosine of near-duplicates' features, standardised with mean and
            standard deviation of all; None: so large that about one random pair of these images
            would reach it, and at least `maect.answers.alike.LEAST`.
        within: also pairs inside a split.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: a cosine above 0 and up to 1")
    names = []
    files = []
    of_split = []
    for split in splits:
        own = image_names(split.index)
        names += own
        of_split += [split.name] * len(own)
        files += _files(split.index, own)
    features = np.concatenate([split.features.all() for split in splits])
    images = SearchedImages(
        names, _digests(splits), of_split, linked_names(files, of_split),
        vectors=comparable(features, scale_of(features)),
    )  # fmt: skip
    return find_pairs(images, within=within, least=threshold)


def _files(index: Index, names: list[str]) -> list[tuple[Path, str] | None]:
    """Return the folder and name of the file that each image was sharded from, if it is there."""
    plan = seek_record(index.directory / "plan.json")
    if "source" not in plan:
        return [None] * len(names)
    folder = Path(plan["source"])
    return [(folder, name) if (folder / name).is_file() else None for name in names]


def _digests(splits: list[AuditedSplit]) -> list[bytes | None]:
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


def write_audit(
    run: str, found: Found, splits: list[AuditedSplit], out: Path
) -> list[dict[str, Any]]:
    """Write tables of pairs, lists to leave images out by, and a page; returns the pairs."""
    index_of = {split.name: split.index for split in splits}
    rows_of = {
        name: {key: i for i, key in enumerate(image_names(index))}
        for name, index in index_of.items()
    }

    def picture(split: str, name: str) -> str:
        row = np.array([rows_of[split][name]])
        (square,) = pictures(index_of[split], row, _THUMBNAIL, _THUMBNAIL)
        return jpeg_uri(Image.fromarray(square))

    excluded = _excluded(found.pairs)
    for split in splits:
        path = out / f"exclude-{split.name}.txt"
        if names := excluded.get(split.name):
            write_text(path, "".join(f"{name}\n" for name in names))
        else:
            path.unlink(missing_ok=True)
    where = " and ".join(f"{split.name} ({split.index.n:,} images)" for split in splits)
    exclude = {f"exclude-{name}.txt": len(names) for name, names in excluded.items()}
    return write_pairs(out, found, HEADER, picture, where=where, exclude=exclude, encoder=run)


def _excluded(pairs: list[Pair]) -> dict[str, list[str]]:
    """Return the images to leave out of each split so that no pair is left; of a pair one stays.

    Of a pair across splits the training image goes, or without a split of this name the first's.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        ends = (pair.split_a, pair.a), (pair.split_b, pair.b)
        if any(name in found[split] for split, name in ends):
            continue  # this pair is parted already
        inside = pair.split_a == pair.split_b
        split, name = ends[1] if inside or pair.split_b == TRAIN else ends[0]
        found[split].add(name)
    return {split: sorted(names) for split, names in found.items() if names}
