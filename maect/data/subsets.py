"""Choose parts of a sharded split without copying it: some classes, or the labelled samples.

Labelled are the samples of the official low-shot lists, or of seeded subsets. Rows of an index and
of its features files are numbered alike: logistic regression and fine-tuning see the same images.
"""

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.core.files import atomic_write, sha256_file, write_record, write_text
from maect.data import MARK, key_of, random
from maect.data.index import CHECKSUMS, ID, LABEL, Index, open_index
from maect.data.sources.base import read_list
from maect.recipes.few_labels import fraction_list, shots_list

_MARKED = re.compile(rf"-[0-9a-f]{{{MARK - 1}}}$")


def class_view(shards: Path, out: Path, classes: Sequence[str]) -> int:
    """Write an index of some classes of a sharded split; return the number of samples.

    Labels are the positions in `classes`; samples keep their ids and their order.
    """
    index = open_index(shards)
    unknown = [name for name in classes if name not in index.class_names]
    if unknown:
        raise UserError(f"{shards}: no class {unknown[0]!r}")
    labels = [index.class_names.index(name) for name in classes]
    new_label = np.full(len(index.class_names) + 1, -1, np.int64)
    new_label[labels] = np.arange(len(labels))
    chosen = np.flatnonzero(new_label[index.labels] >= 0)
    rows = np.array(index.rows[chosen])
    rows[:, LABEL] = new_label[rows[:, LABEL]]
    counts = np.bincount(rows[:, LABEL], minlength=len(labels))
    if (counts == 0).any():
        raise UserError(f"{shards}: no images of class {classes[int(counts.argmin())]!r}")
    keys = index.keys()
    with atomic_write(out / "index.npy") as temporary, open(temporary, "wb") as file:
        np.save(file, rows)
    write_text(out / "keys.txt", "".join(f"{keys[i]}\n" for i in chosen))
    with atomic_write(out / CHECKSUMS) as temporary:
        shutil.copyfile(index.directory / CHECKSUMS, temporary)
    parent = os.path.relpath(Path(shards).resolve(), out.resolve())
    files = [{**s, "file": os.path.join(parent, s["file"])} for s in index.record["shards"]]
    identity = hashlib.sha256(index.digest.encode() + rows.tobytes()).hexdigest()
    repeated = ("pixels", "turned")
    facts = {key: value for key, value in index.record.items() if key in repeated}
    write_record(
        out / "index.json",
        {
            "digest": identity,
            "index_sha256": sha256_file(out / "index.npy"),
            "keys_sha256": sha256_file(out / "keys.txt"),
            "split": index.record["split"],
            "n": len(rows),
            "class_names": list(classes),
            "options": index.record["options"],
            **facts,
            "view_of": {"folder": parent, "digest": index.digest},
            "crc32_sha256": index.record["crc32_sha256"],
            "shards": files,
        },
    )
    return len(rows)


@dataclass(frozen=True)
class Labelled:
    """Labels of a train split.

    Attributes:
        labels: int64 [n].
        names: returns the names of the samples, in order.
        class_names: every class, with or without a sample.
    """

    path: Path
    labels: NDArray[np.int64]
    names: Callable[[], list[str]]
    class_names: Sequence[str]


def shots_rows(
    train: Labelled, shots: int, split: int, seed: int, folder: str | None
) -> NDArray[np.int64]:
    """Return increasing rows of a split with `shots` samples per class.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.
    """
    if folder is not None:
        return _rows_of_list(train, shots_list(folder, shots, split))
    try:
        return balanced_rows(train.labels, shots, (seed << 16) + split, train.class_names)
    except UserError as error:
        raise UserError(
            f"{train.path}: {error}; ask for fewer shots, or leave the class out (kind: view)"
        ) from None


def subset_record(index: Index) -> dict[str, Any]:
    """Return the size of a subset of a split, and the sha256 of its samples' names in order."""
    split = open_index(index.directory)
    chosen = np.isin(split.rows[:, ID], index.rows[:, ID])
    text = "".join(f"{name}\n" for name, take in zip(split.keys(), chosen, strict=True) if take)
    return {"images": index.n, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def fraction_rows_of(
    train: Labelled, fraction: float, seed: int, folder: str | None
) -> NDArray[np.int64]:
    """Return increasing rows of a fraction of the labels; all rows for 1.

    Seeded subsets are nested and take the same fraction of every class, at least one sample.
    """
    if fraction == 1:
        return np.arange(len(train.labels))
    if folder is not None:
        return _rows_of_list(train, fraction_list(folder, fraction))
    return fraction_rows(train.labels, fraction, seed << 16)


def _rows_of_list(train: Labelled, path: Path) -> NDArray[np.int64]:
    """Return the rows of the samples whose file names a list holds."""
    try:
        return rows_by_name(train.names(), read_list(path), train.path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def rows_by_name(keys: Sequence[str], names: Iterable[str], where: Path) -> NDArray[np.int64]:
    """Return the rows of images given by file name, in increasing order.

    Args:
        keys: names of the split's samples, in order.
        names: file names as in the original data set, with or without folder and extension.
    """
    listed = [(name, *key_of(name).rpartition("/")[::2]) for name in names]
    # Only those listed are looked up: a split may have millions of names.
    rows_of: dict[str, list[int]] = {stem: [] for _, _, stem in listed}
    # a.jpg beside a.png has the key a, and a.png a mark behind it (`key_of`).
    marked: dict[str, list[int]] = {stem: [] for stem in rows_of}
    for row, key in enumerate(keys):
        base = key.rpartition("/")[2]
        if base in rows_of:
            rows_of[base].append(row)
        elif base[:-MARK] in marked and _MARKED.search(base):
            marked[base[:-MARK]].append(row)
    rows = []
    missing = []
    for name, folder, stem in listed:
        candidates = rows_of[stem]
        if folder:  # a list may name more folders than keys have, and fewer
            candidates = [row for row in candidates if _is_same_path(keys[row], f"{folder}/{stem}")]
        if marked[stem]:
            candidates = _by_whole_name(keys, name, candidates, marked[stem])
        if len(candidates) > 1:
            raise UserError(f"{where}: {name} names {len(candidates)} images; give the folder")
        if candidates:
            rows.append(candidates[0])
        else:
            missing.append(name)
    if missing:
        raise UserError(f"{where}: lacks {len(missing)} listed images, {missing[0]} first")
    twice = [row for row, count in Counter(rows).items() if count > 1]
    if twice:
        raise UserError(f"{where}: {len(twice)} images are listed twice, {keys[twice[0]]} first")
    return np.array(sorted(rows), np.int64)


def _by_whole_name(
    keys: Sequence[str], name: str, plain: Sequence[int], marked: Sequence[int]
) -> list[int]:
    """Return the image of a name among those of one stem; UserError if it has to be whole."""
    exact = [row for row in marked if keys[row] == key_of(name, taken=True)]
    if exact or not plain:
        return exact
    if "." in PurePosixPath(name).name and any(keys[row] == key_of(name) for row in plain):
        return [row for row in plain if keys[row] == key_of(name)]
    raise UserError(f"{name}: may be one of several images; give its folder and its extension")


def _is_same_path(key: str, name: str) -> bool:
    """Return whether two names are equal, but for more folders before one of them."""
    short, long = sorted((key, name), key=len)
    return long == short or long.endswith(f"/{short}")


def balanced_rows(
    labels: NDArray[np.int64], per_class: int, seed: int, names: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Draw `per_class` samples of every class; return increasing rows.

    For one seed the subsets are nested: those for 1 are among those for 2.

    Args:
        labels: int64 [n]; -1 is left out.
        names: class names; a class without a sample is an error, too.
    """
    classes, counts, rows = _shuffled(labels, seed)
    wanted = np.union1d(classes, np.arange(len(names)))
    available = np.bincount(labels[rows], minlength=len(names))[wanted]
    if available.min() < per_class:
        few = int(wanted[available.argmin()])
        name = names[few] if few < len(names) else few
        raise UserError(f"class {name}: {available.min()} samples, {per_class} wanted")
    return _first_rows(rows, counts, np.full(len(counts), per_class))


def fraction_rows(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """Draw a fraction of every class, rounded and at least one sample; return increasing rows.

    For one seed the subsets are nested, also with those of `balanced_rows`; -1 is left out.
    """
    _, counts, rows = _shuffled(labels, seed)
    return _first_rows(rows, counts, np.maximum(1, np.rint(fraction * counts).astype(np.int64)))


def held_out_mask(index: Index, count: int, seed: int) -> NDArray[np.bool_]:
    """Draw `count` samples to hold out, the same for every encoder; return bool [n]."""
    rank = random.bits(seed, 0, index.rows[:, ID], 0, random.HELD_OUT, 1)[:, 0]
    mask = np.zeros(index.n, bool)
    mask[rank.argsort(kind="stable")[:count]] = True
    return mask


def _shuffled(
    labels: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return classes, their numbers of rows, and the rows by class in random order within it."""
    labels = np.asarray(labels)
    rank = random.bits(seed, 0, np.arange(len(labels)), 0, random.SUBSET, 1)[:, 0]
    rows = np.lexsort((rank, labels))
    rows = rows[labels[rows] >= 0]
    classes, counts = np.unique(labels[rows], return_counts=True)
    if not len(classes):
        raise UserError("a class-balanced subset needs labels, and there are none")
    return classes, counts, rows


def _first_rows(
    rows: NDArray[np.int64], counts: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the first `wanted` rows of each class, increasing; `rows` are sorted by class."""
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(rows[within < np.repeat(wanted, counts)]).astype(np.int64)
