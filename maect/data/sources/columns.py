"""Read images in the columns of parquet files, as Hugging Face's data sets have them."""

import json
import os
import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from maect.core.errors import UserError
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, Listing, files_of, short_names

if TYPE_CHECKING:
    import pyarrow as pa

_IMAGES = ("image", "img", "jpg", "png", "picture", "photo")
_LABELS = ("label", "labels", "class", "fine_label", "target")
_ROWS = 16
"""Rows that are read at once."""
_BATCHES_KEPT = 4


class Columns(ImageSource):
    """An image column {bytes, path}, or of plain bytes, and maybe a column of labels.

    Labels are those of the data set's ClassLabel, if its features say so; else they number the
    values in their order.
    """

    kind = "parquet"
    about = (
        "a .parquet file with a column of images (bytes, or Hugging Face's {bytes, path}) and "
        "maybe `label`; or a folder of such files, or a pattern (DIR/train-*.parquet)"
    )

    def __init__(self, path: Path, labels: Path | None = None) -> None:
        super().__init__(path, labels)
        self._lock = threading.Lock()
        self._ahead: dict[Entry, tuple[int, int]] = {}
        """Size and offset in the scratch file of the images that were read ahead."""

    @cached_property
    def _tables(self) -> dict[str, "_Table"]:
        """Open the files, by their names below the folder."""
        files = files_of(self.path, ".parquet")
        return {str(file.relative_to(self.root)): _Table(file) for file in files}

    def list_images(self) -> Listing:
        """List the rows of all files in order, named by their images' paths if those differ."""
        rows: list[tuple[str, int, str | None]] = []
        values: list[Any] = []
        known = next(iter(self._tables.values())).class_names
        for where, table in self._tables.items():
            if table.class_names != known:
                raise UserError(f"{table.path}: has other class names than the files before it")
            names, labels = table.names_and_labels()
            rows += [(where, row, name) for row, name in enumerate(names)]
            values += labels
        labels_, classes = self._labels(values, known)
        paths = [name and _safe_name(name) for *_, name in rows]
        if None in paths or len(set(paths)) < len(paths):
            files = short_names(self._tables)
            paths = [f"{files[where]}/{row:08d}.image" for where, row, _ in rows]
        entries = [
            Entry(str(path), label, where, row)
            for path, label, (where, row, _) in zip(paths, labels_, rows, strict=True)
        ]
        return Listing(entries, classes, [])

    def _labels(self, values: list[Any], known: list[str] | None) -> tuple[list[int], list[str]]:
        given = [value for value in values if value is not None and value != UNLABELLED]
        if not given:
            return [UNLABELLED] * len(values), []
        if len(given) < len(values):
            raise UserError(
                f"{self.path}: {len(values) - len(given)} of {len(values)} rows have no label"
            )
        if not all(isinstance(value, int | str) for value in given):
            kind = next(type(value).__name__ for value in given if not isinstance(value, int | str))
            raise UserError(f"{self.path}: labels are neither whole numbers nor texts, but {kind}")
        if known is not None:
            if not 0 <= min(given) <= max(given) < len(known):
                raise UserError(f"{self.path}: labels beyond its {len(known)} class names")
            return [int(value) for value in values], known
        different = sorted(set(given))
        number = {value: i for i, value in enumerate(different)}
        return [number[value] for value in values], [str(value) for value in different]

    def read(self, entry: Entry) -> bytes:
        """Read the bytes of a row."""
        if entry in self._ahead:
            size, offset = self._ahead[entry]
            return os.pread(self._scratch.fileno(), size, offset)
        with self._lock:  # one reader at a time, whose place in the file is kept
            data = self._tables[entry.path].image(entry.offset)
        if data is None:
            raise OSError(0, "its row has no bytes; put the images into the file")
        return data

    def read_ahead(self, entries: Sequence[Entry], folder: Path) -> None:
        """Copy images that lie anywhere to a scratch file, in one pass over the tables.

        A row comes with those around it, and memory need not hold a shard's images.
        """
        self._ahead = {}
        self._scratch = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        for entry in sorted(entries, key=lambda entry: (entry.path, entry.offset)):
            data = self._tables[entry.path].image(entry.offset)
            if data is not None:
                self._ahead[entry] = len(data), self._scratch.tell()
                self._scratch.write(data)
        self._scratch.flush()


class _Table:
    """One file, whose rows come in groups."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._batches: deque[tuple[int, pa.Array]] = deque(maxlen=_BATCHES_KEPT)
        self._reader: Iterator[pa.RecordBatch] = iter(())
        self._group = self._next = -1
        try:
            self._file = parquet.ParquetFile(path)
            self.schema, about = self._file.schema_arrow, self._file.metadata
            groups = (about.row_group(n).num_rows for n in range(self._file.num_row_groups))
            self._starts = [0, *accumulate(groups)]
        except (pa.ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"{path}: not a parquet file ({why})") from None
        self.path = path
        self._image = self._find_image()
        names = [field.name for field in self.schema]
        classes = [name for name in names if _class_names(self.schema, name)]
        named = [name for name in _LABELS if name in names]
        both = [name for name in named if name in classes]
        self._label = next(iter(both or named or classes), None)
        self.class_names = _class_names(self.schema, self._label) if self._label else None

    def _find_image(self) -> str:
        import pyarrow as pa

        def is_image(kind: "pa.DataType") -> bool:
            if pa.types.is_struct(kind):
                inside = [inner.type for inner in kind if inner.name == "bytes"]
                return any(not pa.types.is_struct(inner) and is_image(inner) for inner in inside)
            return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

        found = [field.name for field in self.schema if is_image(field.type)]
        if not found:
            columns = ", ".join(field.name for field in self.schema)
            raise UserError(f"{self.path}: no column of images (bytes) among {columns}")
        return next((name for name in _IMAGES if name in found), found[0])

    def names_and_labels(self) -> tuple[list[str | None], list[Any]]:
        """Return path and label of each row, None where it has none; read no image."""
        import pyarrow as pa

        rows = self._starts[-1]
        names: list[str | None] = [None] * rows
        labels: list[Any] = [None] * rows
        kind = self.schema.field(self._image).type
        if pa.types.is_struct(kind) and any(inner.name == "path" for inner in kind):
            column = self._file.read([f"{self._image}.path"])[self._image]
            names = [row and row["path"] for row in column.to_pylist()]
        if self._label is not None:
            labels = self._file.read([self._label])[self._label].to_pylist()
        return names, labels

    def image(self, row: int) -> bytes | None:
        """Return the image of a row; fast if rows are asked for in about their order."""
        for start, images in self._batches:
            if start <= row < start + len(images):
                return _bytes(images[row - start])
        group = bisect_right(self._starts, row) - 1
        if group != self._group or row < self._next:
            self._group, self._next = group, self._starts[group]
            self._reader = self._file.iter_batches(_ROWS, [group], [self._image])
        for batch in self._reader:
            start = self._next
            images = batch.column(self._image)
            self._next += len(images)
            if row < self._next:
                self._batches.append((start, images))
                return _bytes(images[row - start])
        raise OSError(0, "its table has become shorter")


def _bytes(image: "pa.Scalar") -> bytes | None:
    value = image.as_py()
    return value["bytes"] if isinstance(value, dict) else value


def _class_names(schema: "pa.Schema", column: str) -> list[str] | None:
    """Return the names of Hugging Face's ClassLabel in a file's metadata, or None."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, ValueError, TypeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _safe_name(path: str) -> str | None:
    """Return a path as a name below a folder; None if it leads out of it."""
    pure = PurePosixPath(path)
    parts = pure.parts[1:] if pure.is_absolute() else pure.parts
    return None if ".." in parts or not parts else "/".join(parts)
