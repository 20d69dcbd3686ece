"""Which training samples are labelled: the official low-shot lists, or seeded subsets.

Rows of an index and of its features files are numbered alike, so that logistic regression and
fine-tuning see the same images.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.data.index import ID, Index, open_index
from maect.data.sources.base import read_list
from maect.data.subsets import balanced_rows, fraction_rows, rows_by_name

SHOTS_LIST = "msn_{shots}shot_split{split}.txt"
FRACTION_LIST = "simclr_{percent:g}percent.txt"


@dataclass(frozen=True)
class Labelled:
    """A train split as far as subsets need it.

    Attributes:
        path: its file or folder, for messages.
        labels: int64 [n].
        names: gives the names of the samples, in order.
        class_names: every class that there is, with or without a sample.
    """

    path: Path
    labels: NDArray[np.int64]
    names: Callable[[], list[str]]
    class_names: Sequence[str]


def shots_rows(
    train: Labelled, shots: int, split: int, seed: int, folder: str | None
) -> NDArray[np.int64]:
    """Increasing rows of a split with so many samples per class.

    Seeded subsets are nested like MSN's: the samples for 1 shot are among those for 2 and 5.

    Raises:
        UserError: a class has fewer samples or none, or a list does not fit the split.
    """
    if folder is not None:
        return _listed(train, _path(folder, SHOTS_LIST.format(shots=shots, split=split)))
    try:
        return balanced_rows(train.labels, shots, (seed << 16) + split, train.class_names)
    except UserError as error:
        raise UserError(
            f"{train.path}: {error}; ask for fewer shots, or leave the class out (kind: view)"
        ) from None


def subset_record(index: Index) -> dict[str, Any]:
    """Size of a subset of a split, and sha256 of its samples' names in the split's order."""
    split = open_index(index.directory)
    chosen = np.isin(split.rows[:, ID], index.rows[:, ID])
    text = "".join(f"{name}\n" for name, take in zip(split.keys(), chosen, strict=True) if take)
    return {"images": index.n, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def fraction_name(fraction: float) -> str:
    """Name of the metric: `low_shot_1pct` for 0.01."""
    return f"low_shot_{100 * fraction:g}pct"


def fraction_rows_of(
    train: Labelled, fraction: float, seed: int, folder: str | None
) -> NDArray[np.int64]:
    """Increasing rows of a fraction of the labels; all of them for 1.

    Seeded subsets are nested and take the same fraction of every class, at least one sample.

    Raises:
        UserError: a list does not fit the split.
    """
    if fraction == 1:
        return np.arange(len(train.labels))
    if folder is not None:
        return _listed(train, _path(folder, FRACTION_LIST.format(percent=100 * fraction)))
    return fraction_rows(train.labels, fraction, seed << 16)


def _path(folder: str, name: str) -> Path:
    return Path(os.path.expandvars(folder)).expanduser() / name


def _listed(train: Labelled, path: Path) -> NDArray[np.int64]:
    """Rows of the samples whose file names a list holds."""
    try:
        return rows_by_name(train.names(), read_list(path), train.path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
