"""The format of features files: one safetensors file per (encoder, dataset, split).

Also their standardisation, to mean 0 and standard deviation 1 as scikit-learn's StandardScaler.

Needs no torch, so that protocols on stored features start quickly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import safetensors
from numpy.typing import NDArray

from maect.core.errors import MissingFileError, UserError
from maect.core.files import atomic_write, check_file, sealed, verified

if TYPE_CHECKING:
    from maect.data.index import Index

_CHUNK = 16384
CONTENTS = "crc32"
"""Tensor with the CRC-32 of each image's bytes."""

Array: TypeAlias = NDArray[np.float32]
Scale: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
Correction: TypeAlias = Callable[[Array], Array]
"""Corrects rows, float32 [n, d]."""


@dataclass(frozen=True)
class FeatureFile:
    """A features file: small parts in memory, the features themselves mapped from the disk.

    Attributes:
        values: the features of each sample, float32 [n, width], read-only.
        labels: int64 [n], -1 where unlabelled.
        record: what the file says about its making: `encoder_sha256`, `index_digest`, `pooling`,
            `image_size`, `resize`, `precision`, `class_names`, ...
    """

    path: Path
    values: Array
    labels: NDArray[np.int64]
    record: dict[str, Any]

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.values)

    @property
    def width(self) -> int:
        """Number of features of a sample."""
        return self.values.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes: those that the dataset names, used or not."""
        return max(len(self.record["class_names"]), int(self.labels.max(initial=-1)) + 1)

    def names(self) -> list[str]:
        """Names of the samples, in order."""
        with safetensors.safe_open(self.path, framework="numpy") as file:
            return file.get_tensor("keys").tobytes().decode().split("\n")

    def contents(self) -> list[int] | list[str]:
        """Return the CRC-32 of each sample's image file: equal for equal images.

        Files of version 0.2.0 and earlier lack them. Digests of the names stand in for them.
        """
        with safetensors.safe_open(self.path, framework="numpy") as file:
            if CONTENTS in file.keys():  # noqa: SIM118 (it is no mapping)
                known: list[int] = file.get_tensor(CONTENTS).tolist()
                return known
        return [hashlib.sha256(name.encode()).hexdigest() for name in self.names()]


def open_features(path: str | Path) -> FeatureFile:
    """Open a features file and check all of it against the checksum in its header.

    Raises:
        UserError: missing, not a features file, damaged, or without samples.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such features file; make it with maect features")
    with _opened(path) as (record, file):
        labels, names = file.get_tensor("labels"), file.get_tensor("keys")
        contents = file.get_tensor(CONTENTS) if CONTENTS in file.keys() else None  # noqa: SIM118
        shape = file.get_slice("features").get_shape()
        if not math.prod(shape):  # which cannot be mapped
            raise UserError(f"{path}: holds no samples")
        values = _mapped(path, shape)
    if _digest(chunks(values), labels, names, contents) != record["sha256"]:
        raise UserError(f"{path}: damaged (its checksum differs); delete it and extract it again")
    return FeatureFile(path, values, labels, record)


def _mapped(path: Path, shape: Sequence[int]) -> Array:
    """Return the features of a file, read-only: the library's own reader would copy them."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    start = 8 + length + header["features"]["data_offsets"][0]
    return np.asarray(np.memmap(path, np.float32, "r", start, tuple(shape)))


def chunks(values: Array) -> Iterator[Array]:
    """Yield all rows, some thousand at a time: sums over them have one order."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def open_record(path: str | Path) -> dict[str, Any]:
    """Read the header of a features file.

    Raises:
        UserError: it is not there (MissingFileError), or none.
    """
    with _opened(Path(path)) as (record, _):
        return record


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open a features file: its header and tensors; any fault while it is open is a UserError."""
    try:
        check_file(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            yield verified(json.loads((file.metadata() or {})["maect"])), file
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"{path}: not a features file ({error}); extract it again") from None


def check_labelled(features: FeatureFile) -> None:
    """Raise UserError for features of which some have no label."""
    if features.labels.min() < 0:
        row = int(np.argmin(features.labels))
        raise UserError(f"{features.path}: sample {row} has no label, and this protocol needs one")


def check_same_encoder(train: FeatureFile, test: FeatureFile) -> None:
    """Raise UserError if two files differ in encoder, pooling, classes or sizes."""
    for key in (
        "encoder_sha256", "pooling", "precision", "norm", "blocks", "class_names", "image_size",
        "resize",
    ):  # fmt: skip
        if train.record.get(key) != test.record.get(key):
            raise UserError(
                f"{train.path} and {test.path}: {key} differs; extract both in the same way"
            )
    if train.width != test.width:
        raise UserError(f"{train.path} and {test.path}: {train.width} and {test.width} features")


def check_images(features: FeatureFile, index: Index) -> None:
    """Raise UserError if features are of other images than a split's."""
    if index.digest != features.record["index_digest"]:
        raise UserError(
            f"{features.path}: features of other images than those in {index.directory}"
        )


def moments(values: Array) -> Scale:
    """Compute mean and (biased) standard deviation of each feature in chunks, float64 [width].

    The standard deviation of a feature that does not vary is infinite: standardised it is 0.
    """
    mean = mean_of(values)
    total = np.zeros(values.shape[1])
    for part in chunks(values):
        total += np.square(part - mean).sum(axis=0)
    std = np.sqrt(total / len(values))
    # Rounding leaves a trace of a spread on a feature that is the same everywhere.
    std[std <= 1e-6 * np.abs(mean)] = np.inf
    return mean, std


def mean_of(values: Array) -> NDArray[np.float64]:
    """Return the mean of each feature, float64 [width]."""
    total = np.zeros(values.shape[1])
    for part in chunks(values):
        total += part.sum(axis=0, dtype=np.float64)
    return total / len(values)


def standardize(rows: Array, scale: Scale) -> Array:
    """(x - mean) / standard deviation, in float64 until rounded: float32 [n, width]."""
    return ((rows - scale[0]) / scale[1]).astype(np.float32)


def unit(rows: Array) -> Array:
    """Scale rows to length 1; rows of zeros stay."""
    length: Array = np.linalg.norm(rows, axis=1, keepdims=True)
    length[length == 0] = 1
    return rows / length


def _digest(
    parts: Iterable[NDArray[np.float32]],
    labels: NDArray[np.int64],
    names: NDArray[np.uint8],
    contents: NDArray[np.uint32] | None,
) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    digest.update(np.ascontiguousarray(labels).data)
    digest.update(names.data)
    if contents is not None:
        digest.update(np.ascontiguousarray(contents).data)
    return digest.hexdigest()


def write_features(
    path: str | Path,
    parts: Iterable[NDArray[np.float32]],
    *,
    width: int,
    labels: NDArray[np.int64],
    keys: list[str],
    record: dict[str, Any],
    contents: NDArray[np.uint32] | None = None,
) -> None:
    """Write a features file atomically, part by part, so that memory holds one part only.

    safetensors' own writer takes whole tensors: 6.6 GB for ImageNet's train split and ViT-H, where
    a part has 42 MB. Hence the header by hand; readers use the library.

    Args:
        parts: float32 [m, width] each, in order; together as many rows as there are labels.
        record: what to say about the file's making; `sha256` is added.
        contents: CRC-32 of each image's bytes, uint32 [n], if they are known.
    """
    names = np.frombuffer("\n".join(keys).encode(), np.uint8)
    n = len(labels)
    offset = 0
    tensors = dict[str, Any]()
    kinds: tuple[tuple[str, str, int, list[int]], ...] = (
        ("features", "F32", 4, [n, width]),
        ("labels", "I64", 8, [n]),
        ("keys", "U8", 1, [len(names)]),
        *(((CONTENTS, "U32", 4, [n]),) if contents is not None else ()),
    )
    for name, dtype, size, shape in kinds:
        end = offset + size * math.prod(shape)
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end

    def header(sha256: str) -> bytes:
        about = {**record, "sha256": sha256}
        text = json.dumps(sealed(dict(sorted(about.items()))))
        data = json.dumps({"__metadata__": {"maect": text}, **tensors}).encode()
        data += b" " * (-len(data) % 8)  # the format aligns its data
        return len(data).to_bytes(8, "little") + data

    rows = 0

    def written(file: Any) -> Iterator[NDArray[np.float32]]:
        nonlocal rows
        for part in parts:
            if part.dtype != np.float32 or part.shape[1:] != (width,):
                raise ValueError(f"{path}: a part is {part.dtype} {part.shape}, width {width}")
            file.write(np.ascontiguousarray(part).data)
            rows += len(part)
            yield part

    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(header("0" * 64))  # the checksum has a fixed length and is filled in below
        sha256 = _digest(written(file), labels, names, contents)
        if rows != len(labels):
            raise ValueError(f"{path}: {rows} rows of features for {len(labels)} labels")
        file.write(np.ascontiguousarray(labels).data)
        file.write(names.data)
        if contents is not None:
            file.write(np.ascontiguousarray(contents).data)
        file.seek(0)
        file.write(header(sha256))
        file.flush()
