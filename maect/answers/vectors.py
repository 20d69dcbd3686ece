"""Vectors of a folder's images with the files' own names: made, written, read, and searched."""

import csv
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maect.answers.encoder import ImageEncoder
from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.data.sources import ImageSource, kind_of, open_source
from maect.data.sources.base import is_there, is_utf8
from maect.data.sources.files import Unlabelled
from maect.evaluate.clusters import unit
from maect.evaluate.features import BATCH
from maect.recipes import Pixels

log = logging.getLogger(__name__)

FORMATS = (".parquet", ".npy", ".csv")
_EVERY = 10.0
"""Seconds between messages of how far it is."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Vectors:
    """Vectors of images by name.

    Attributes:
        files: names of the images, below `about["images"]`.
        values: float32 [n, width].
        labels: class of each image, where the images have classes.
        about: what made them: `encoder_sha256`, `run`, `pooling`, `image_size`, `resize`,
            `precision`, `pixels` unless they are as the paper's, and `images` and `kind`, which the
            files are found by.
    """

    files: list[str]
    values: Array
    labels: list[str] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write them as the suffix says: .parquet, .csv, or .npy with the names beside it.

        A parquet file has the columns `file`, `vector` (a list of float32) and, where there are
        classes, `label`; `about` is JSON under the key `maect` of its metadata. A .csv has a column
        for each number, with as many digits as give it back. Beside X.npy lies X.files.csv.

        Raises:
            UserError: another suffix.
        """
        check_format(path)
        if path.suffix == ".parquet":
            self._write_parquet(path)
        elif path.suffix == ".csv":
            self._write_csv(path)
        else:
            write_rows(path.with_suffix(".files.csv"), ["file"], ([name] for name in self.files))
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.save(file, self.values)

    def _write_parquet(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        vectors = pa.FixedSizeListArray.from_arrays(self.values.ravel(), self.values.shape[1])
        columns = {"file": pa.array(self.files, pa.string()), "vector": vectors}
        if self.labels is not None:
            columns["label"] = pa.array(self.labels, pa.string())
        table = pa.table(columns).replace_schema_metadata({"maect": json.dumps(self.about)})
        with atomic_write(path) as temporary:
            parquet.write_table(table, temporary)

    def _write_csv(self, path: Path) -> None:
        labels = [[] for _ in self.files] if self.labels is None else [[x] for x in self.labels]
        header = ["file", *([] if self.labels is None else ["label"])]
        lines = zip(self.files, labels, self.values, strict=True)
        rows = ([name, *label, *map(str, vector)] for name, label, vector in lines)
        write_rows(path, [*header, *map(str, range(self.values.shape[1]))], rows)

    @classmethod
    def read(cls, path: Path) -> "Vectors":
        """Read a parquet file that `write` has written.

        Raises:
            UserError: no such file, or another one.
        """
        import pyarrow as pa
        from pyarrow import parquet

        if not path.is_file():
            raise UserError(f"{path}: no such file; `maect embed RUN IMAGES --out {path}` makes it")
        try:
            table = parquet.read_table(path)
            about = json.loads((table.schema.metadata or {})[b"maect"])
            column = table["vector"].combine_chunks()
            values = column.values.to_numpy().reshape(-1, column.type.list_size)
            labels = table["label"].to_pylist() if "label" in table.column_names else None
            return cls(table["file"].to_pylist(), values, labels, about)
        except (pa.ArrowException, KeyError, ValueError, AttributeError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"{path}: not written by `maect embed` ({why})") from None

    def check(self, encoder: ImageEncoder, path: Path) -> None:
        """Refuse an encoder whose vectors cannot be compared with these.

        Raises:
            UserError: other weights, or images resized otherwise.
        """
        for key, what in (("encoder_sha256", "encoder than"), ("resize", "resize than that of")):
            if self.about.get(key) != encoder.about[key]:
                folder = encoder.path.parent
                raise UserError(f"{path}: made with another {what} {folder}; embed again")

    @property
    def pixels(self) -> Pixels:
        """How the images were read."""
        return Pixels.model_validate(self.about.get("pixels", {}))

    def source(self, images: Path | None = None) -> ImageSource:
        """Where the images are; `images` if they have moved.

        Raises:
            UserError: they are not there.
        """
        images = images or Path(self.about["images"])
        return open_images(images, self.about["kind"], self.pixels)[0]


def write_rows(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    """Write a CSV file atomically."""
    with (
        atomic_write(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def check_format(path: Path, formats: tuple[str, ...] = FORMATS) -> None:
    """Refuse a file that cannot be written, before what it is to hold is made.

    Raises:
        UserError: its suffix, or its folder.
    """
    if path.suffix not in formats:
        raise UserError(f"{path}: what format? Its name must end with {' or '.join(formats)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror}") from None


def open_images(
    images: Path, kind: str | None = None, pixels: Pixels | None = None
) -> tuple[ImageSource, str]:
    """A folder, archive or table of images, or what `kind` says that it is; and its kind.

    Args:
        images: where they are.
        kind: of source.
        pixels: of the encoder that they are for.

    Raises:
        UserError: there is no such thing.
    """
    if not is_there(images):
        raise UserError(f"{images}: no such file or folder; the images are expected there")
    if kind is None:
        kind = kind_of(images) or (Unlabelled.kind if images.is_dir() else None)
        if kind is None:
            raise UserError(
                f"{images}: give a folder, an archive, a table (.csv, .tsv, .parquet), or --kind"
            )
    return open_source(kind, images, pixels=pixels), kind


def embed(
    encoder: ImageEncoder, images: Path, kind: str | None = None, batch_size: int = BATCH
) -> tuple[Vectors, dict[str, str]]:
    """Vectors of all images that can be read, in the order of their source.

    Args:
        encoder: of `maect.load`.
        images: a folder, or a table of paths.
        kind: of source, if it is another one or if its folders are classes (`folder`).
        batch_size: images at once on the device.

    Returns:
        The vectors, and why an image was left out, by its name.

    Raises:
        UserError: no images, or none that can be read.
    """
    source, kind = open_images(images, kind, encoder.encoding.settings.pixels)
    listing = source.listing()
    if listing.ignored:
        counts = ", ".join(f"{n} {end or 'without'}" for end, n in listing.ignored_suffixes.items())
        log.info("%s: files left out, by suffix: %s", images, counts)
    entries = [entry for entry in listing.entries if is_utf8(entry.name)]
    left_out = {e.name: "its name is not UTF-8" for e in listing.entries if not is_utf8(e.name)}
    said = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > _EVERY:
            said = time.monotonic()
            log.info("%s: %d of %d images", images, done, len(entries))

    values, faults = encoder.readable(
        lambda number: source.read(entries[number]), len(entries), batch_size, progress=progress
    )
    left_out |= {entries[number].name: why for number, why in faults.items()}
    kept = [entry for number, entry in enumerate(entries) if number not in faults]
    if not kept:
        raise UserError(
            f"{images}: none of {len(listing.entries)} images can be read: {_first(left_out)}"
        )
    named = listing.class_names
    about = {**encoder.about, "images": str(images.resolve()), "kind": kind}
    labels = [named[entry.label] for entry in kept] if named else None
    return Vectors([entry.name for entry in kept], values, labels, about), left_out


def _first(left_out: dict[str, str]) -> str:
    name, why = next(iter(left_out.items()))
    return f"{name} ({why})"


def nearest(index: Vectors, queries: Array, count: int) -> tuple[Array, NDArray[np.int64]]:
    """The images most similar to each query, most similar first; all are compared.

    Args:
        index: vectors of the images.
        queries: float32 [q, width].
        count: how many for each.

    Returns:
        Cosine similarities, float32 [q, count], and positions in the index, int64 [q, count];
        of equal similarities the first in the index comes first.
    """
    similarity = unit(queries) @ unit(index.values).T
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(similarity, order, axis=1), order
