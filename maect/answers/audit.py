"""Images that are there twice, or nearly: by their bytes, and by an encoder's features."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from maect.answers.alike import (
    border,
    link_between,
    most_of,
    near_rows,
    products_of,
    random_pairs,
)
from maect.answers.vectors import jpeg_uri, write_rows
from maect.core.errors import UserError, counted
from maect.core.files import seek_record, write_json, write_text
from maect.data.index import SIZE, Index, open_index
from maect.data.shard_plan import image_names
from maect.data.shared import taken
from maect.evaluate.base import encoder_checksum
from maect.evaluate.clusters import comparable, scale_of
from maect.evaluate.retrieval import pictures
from maect.evaluate.store import Array, FeatureFile, open_features
from maect.report.render import render_page

LEAST = 0.95
"""Cosine of standardised features of near-duplicates, or more if random pairs ask for more."""
SHOWN = 200
"""Pairs on the page."""
TRAIN = "train"
"""Split that images are left out of which another split has, too."""
_THUMBNAIL = 128


@dataclass(frozen=True)
class Pair:
    """Two images that are alike, by their names below their sources.

    Attributes:
        similarity: cosine of their standardised features, 1 of equal files.
        exact: whether their files are equal, byte for byte.
        link: whether the images they were sharded from are one file under two names: "symbolic
            link" or "hard link"; else "".
    """

    a: str
    b: str
    split_a: str
    split_b: str
    similarity: float
    exact: bool
    link: str = ""


@dataclass(frozen=True)
class Audit:
    """The pairs of images that are alike, the most alike first.

    Attributes:
        threshold: smallest cosine of a pair that is not equal.
        cut: whether there are more pairs than are listed.
    """

    pairs: list[Pair]
    threshold: float
    cut: bool


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
    splits: list[AuditedSplit], threshold: float | None = None, within: bool = False
) -> Audit:
    """Pairs of images that are alike, the most alike first.

    Equal files are found by their checksums; each is paired with the first of every split. Others
    are compared by the cosine of their features, standardised with mean and standard deviation of
    all of them.

    Args:
        threshold: smallest cosine; None: so large that about one random pair of these images would
            reach it, and at least `LEAST`.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: a cosine above 0 and up to 1")
    group: dict[tuple[int, int], int] = {}
    exact: dict[tuple[tuple[int, int], tuple[int, int]], float] = {}
    for number, same in enumerate(_equal_files(splits)):
        group |= dict.fromkeys(same, number)
        # One picture may be there a thousand times: each is paired with the first of each split.
        firsts = {s: (s, i) for s, i in reversed(same)}
        for one in same:
            for other in firsts.values():
                if one != other and (within or one[0] != other[0]):
                    low, high = sorted((one, other))
                    exact[low, high] = 1.0
    features = [split.features.all() for split in splits]
    starts = np.cumsum([0, *map(len, features)])
    scale = scale_of(np.concatenate(features))
    vectors = [comparable(part, scale) for part in features]
    compared = [(s, t) for t in range(len(splits)) for s in range(t + within)]
    least = max(LEAST, _random(vectors, compared)) if threshold is None else threshold

    def different() -> Iterator[tuple[int, int, float]]:
        """The pairs that are no equal files, by their rows among all images."""
        for s, t in compared:
            for i, j, similarity in near_rows(vectors[s], vectors[t], least, within=s == t):
                if group.get((s, i), -1) != group.get((t, j), -2):
                    yield int(starts[s]) + i, int(starts[t]) + j, similarity

    near, cut = most_of(different())
    names = [image_names(split.index) for split in splits]
    sources = [_Source(split.index) for split in splits]

    def pair(one: tuple[int, int], other: tuple[int, int], similarity: float, same: bool) -> Pair:
        (s, i), (t, j) = one, other
        a, b = names[s][i], names[t][j]
        link = link_between(sources[s].file(a), sources[t].file(b)) if same else ""
        return Pair(a, b, splits[s].name, splits[t].name, min(similarity, 1.0), same, link)

    def place(row: int) -> tuple[int, int]:
        split = int(np.searchsorted(starts, row, "right")) - 1
        return split, row - int(starts[split])

    pairs = [pair(one, other, 1.0, True) for one, other in exact]
    pairs += [pair(place(i), place(j), value, False) for (i, j), value in near.items()]
    pairs.sort(key=lambda pair: (-pair.similarity, not pair.exact, pair.a))
    return Audit(pairs, least, cut)


def _random(vectors: list[Array], compared: list[tuple[int, int]]) -> float:
    """Return the cosine that about one random pair of different images reaches; 0 if unknown."""
    distances, pairs = [], 0
    for s, t in compared:
        n, m = len(vectors[s]), len(vectors[t])
        i, j = random_pairs(n, None if s == t else m)
        distances.append(1 - products_of(vectors[s], i, vectors[t], j))
        pairs += n * (n - 1) // 2 if s == t else n * m
    found = border(np.concatenate(distances), sum(map(len, vectors)), pairs)
    return 0.0 if found is None else 1 - found


class _Source:
    """The files that a split was sharded from, as far as they are still there."""

    def __init__(self, index: Index) -> None:
        plan = seek_record(index.directory / "plan.json")
        self._folder = Path(plan["source"]) if "source" in plan else None

    def file(self, name: str) -> Path | None:
        """Return the file of an image."""
        path = None if self._folder is None else self._folder / name
        return path if path is not None and path.is_file() else None


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


def write_audit(run: str, found: Audit, splits: list[AuditedSplit], out: Path) -> None:
    """Write `pairs.json`, `pairs.csv`, lists to leave images out by, and a page, `index.html`."""
    pairs, plain = found.pairs, [asdict(pair) for pair in found.pairs]
    write_json(out / "pairs.json", plain)
    header = ["a", "b", "split_a", "split_b", "similarity", "exact", "link"]
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
    excluded = _excluded(pairs)
    for split in splits:
        path = out / f"exclude-{split.name}.txt"
        if names := excluded.get(split.name):
            write_text(path, "".join(f"{name}\n" for name in names))
        else:
            path.unlink(missing_ok=True)
    about = {
        "run": run,
        "threshold": f"{found.threshold:.4g}",
        "pairs": counted(len(pairs), "pair"),
        "count": len(pairs),
        "shown": len(shown),
        "cut": found.cut,
        "exact": counted(sum(pair.exact for pair in pairs), "pair"),
        "links": sum(bool(pair.link) for pair in pairs),
        "exclude": {name: len(names) for name, names in excluded.items()},
        "splits": " and ".join(f"{split.name} ({split.index.n:,} images)" for split in splits),
    }
    write_text(out / "index.html", render_page("audit.html", pairs=shown, about=about))


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
