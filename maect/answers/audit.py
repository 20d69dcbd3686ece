"""Images that are there twice, or nearly: by their bytes, and by an encoder's features."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from maect.answers.vectors import jpeg_uri, write_rows
from maect.core.errors import UserError, counted
from maect.core.files import write_json, write_text
from maect.data.index import SIZE, Index, open_index
from maect.data.shard_plan import image_names
from maect.data.sources.shared import taken
from maect.evaluate.base import encoder_checksum
from maect.evaluate.clusters import comparable, scale_of
from maect.evaluate.retrieval import pictures
from maect.evaluate.store import Array, FeatureFile, open_features
from maect.report.render import render_page

THRESHOLD = 0.95
"""Cosine of standardised features from which two images are nearly the same."""
MOST = 100_000
SHOWN = 200
"""Pairs on the page."""
_ROWS = 4096
_THUMBNAIL = 128


@dataclass(frozen=True)
class Pair:
    """Two images that are alike, by their names below their sources.

    Attributes:
        similarity: cosine of their standardised features, 1 of equal files.
        exact: whether their files are equal, byte for byte.
    """

    a: str
    b: str
    split_a: str
    split_b: str
    similarity: float
    exact: bool


@dataclass(frozen=True)
class AuditedSplit:
    """A split's shards and the features of its images, in one order."""

    name: str
    index: Index
    features: FeatureFile


def open_splits(run: Path, dataset: str | None = None) -> list[AuditedSplit]:
    """The splits of a data set whose features a run's folder has beside it, by name.

    A UserError if they are fewer than two, of several data sets, other images or another encoder.
    """
    root, folder = run.absolute().parents[1], run.name
    splits: dict[str, dict[str, AuditedSplit]] = defaultdict(dict)
    for own in sorted(root.glob("shards/*/*")):
        name, split = own.parent.name, own.name
        # In its folder, or in another experiment's.
        shards = own if (own / "index.json").exists() else taken(own)
        file = root / "features" / folder / f"{name}-{split}.safetensors"
        if file.exists() and shards is not None and dataset in (None, name):
            index, features = open_index(shards), open_features(file)
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
    splits: list[AuditedSplit], threshold: float = THRESHOLD, within: bool = False
) -> list[Pair]:
    """Pairs of images that are alike, the most alike first.

    Equal files are found by their checksums; each is paired with the first of every split. Others
    are compared by the cosine of their features,
    standardised with mean and standard deviation of all of them.

    Raises:
        UserError: so many pairs that the threshold must be too low.
    """
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: a cosine above 0 and up to 1")
    names = [image_names(split.index) for split in splits]
    pairs: dict[tuple[int, int, int, int], Pair] = {}

    def add(one: tuple[int, int], other: tuple[int, int], similarity: float, exact: bool) -> None:
        (s, i), (t, j) = sorted((one, other))
        if (s == t and not within) or (s, i, t, j) in pairs:
            return
        pairs[s, i, t, j] = Pair(
            names[s][i], names[t][j], splits[s].name, splits[t].name, similarity, exact
        )
        if len(pairs) > MOST:
            raise UserError(f"more than {MOST:,} pairs are alike; raise --threshold {threshold:g}")

    group: dict[tuple[int, int], int] = {}
    for number, same in enumerate(_equal_files(splits)):
        group |= dict.fromkeys(same, number)
        # One picture may be there a thousand times: each is paired with the first of each split.
        firsts = {s: (s, i) for s, i in reversed(same)}
        for one in same:
            for other in firsts.values():
                if one != other:
                    add(one, other, 1.0, True)
    features = [split.features.all() for split in splits]
    scale = scale_of(np.concatenate(features))
    vectors = [comparable(part, scale) for part in features]
    for t, others in enumerate(vectors):
        for s, ours in enumerate(vectors[: t + within]):
            for i, j, similarity in _near(ours, others, threshold):
                equal = (s, i) in group and group[s, i] == group.get((t, j))
                if (s != t or i < j) and not equal:
                    add((s, i), (t, j), similarity, False)
    return sorted(pairs.values(), key=lambda pair: (-pair.similarity, not pair.exact, pair.a))


def _equal_files(splits: list[AuditedSplit]) -> list[list[tuple[int, int]]]:
    """Groups of (split, row) with the same bytes; only files of a size that recurs are read."""
    sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, split in enumerate(splits):
        for row, size in enumerate(split.index.rows[:, SIZE].tolist()):
            sizes[size].append((number, row))
    same: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for images in sizes.values():
        for number, row in images if len(images) > 1 else []:
            same[hashlib.sha256(splits[number].index.read(row)).digest()].append((number, row))
    return [images for images in same.values() if len(images) > 1]


def _near(a: Array, b: Array, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Rows of both whose product is large enough, and the product, block by block."""
    for start in range(0, len(a), _ROWS):
        for other in range(0, len(b), _ROWS):
            products = a[start : start + _ROWS] @ b[other : other + _ROWS].T
            for i, j in np.argwhere(products >= threshold):
                yield start + int(i), other + int(j), min(float(products[i, j]), 1.0)


def write_audit(
    run: str, pairs: list[Pair], splits: list[AuditedSplit], threshold: float, out: Path
) -> None:
    """Write `pairs.json`, `pairs.csv` and a page with the pictures, `index.html`."""
    plain = [asdict(pair) for pair in pairs]
    write_json(out / "pairs.json", plain)
    header = ["a", "b", "split_a", "split_b", "similarity", "exact"]
    rows = (
        [json.dumps(pair[key]) if key == "exact" else str(pair[key]) for key in header]
        for pair in plain
    )
    write_rows(out / "pairs.csv", header, rows)
    index_of = {split.name: split.index for split in splits}
    rows_of = {
        split: {n: i for i, n in enumerate(image_names(index_of[split]))} for split in index_of
    }

    def thumbnail(split: str, name: str) -> str:
        row = np.array([rows_of[split][name]])
        (square,) = pictures(index_of[split], row, _THUMBNAIL, _THUMBNAIL)
        return jpeg_uri(Image.fromarray(square))

    shown = [
        {**pair, "pictures": [thumbnail(pair[f"split_{x}"], pair[x]) for x in "ab"]}
        for pair in plain[:SHOWN]
    ]
    about = {
        "run": run,
        "threshold": f"{threshold:g}",
        "pairs": counted(len(pairs), "pair"),
        "exact": counted(sum(pair.exact for pair in pairs), "pair"),
        "splits": " and ".join(f"{split.name} ({split.index.n:,} images)" for split in splits),
    }
    write_text(out / "index.html", render_page("audit.html", pairs=shown, about=about))
