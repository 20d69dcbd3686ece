"""Vectors of a folder's images with the files' own names: made, written, read, and searched."""

import csv
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.core.log import progress
from maect.core.settings import digest
from maect.data.sources import kind_of, open_source
from maect.data.sources.base import Entry, ImageSource, is_there, is_utf8
from maect.data.sources.image_files import Unlabelled
from maect.evaluate.clustering import comparable, scale_of
from maect.recipes import Pixels

if TYPE_CHECKING:  # it imports torch
    from maect.answers.encoder import ImageEncoder

log = logging.getLogger(__name__)

SUFFIX = ".parquet"
"""Suffix of files with vectors."""
_CHECKSUM = b"maect.sha256"
"""Key of a parquet file's metadata."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Vectors:
    """Vectors of images by name.

    Attributes:
        files: names of the images, below `about["images"]`.
        values: float32 [n, width].
        labels: class of each image, where the images have classes.
        about: what made them: `encoder_sha256`, `run`, `pooling`, `image_size`, `resize`,
            `precision`, `pixels` (how the images were read, as far as it is not as the paper's),
            and `images` and `kind`, which the files are found by.
        stamps: int64 [n], of the size and times of each image's file; 0: unknown. Another one says
            that the file has changed.
    """

    files: list[str]
    values: Array
    labels: list[str] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    stamps: NDArray[np.int64] | None = None

    @classmethod
    def read(cls, path: Path) -> "Vectors":
        """Read a parquet file of `write_vectors`, or raise a UserError: another one, or damaged."""
        import pyarrow as pa
        from pyarrow import parquet

        where = path.with_suffix(SUFFIX)
        hint = f"`maect embed RUN IMAGES --out {where}` makes one"
        if not path.is_file():
            raise UserError(f"{path}: no such file; {hint}")
        if path.suffix != SUFFIX:
            raise UserError(f"{path}: vectors are read from .parquet alone; {hint}")
        try:
            file = parquet.ParquetFile(path)
            table = file.read()
            about = json.loads((table.schema.metadata or {})[b"maect"])
            column = table["vector"].combine_chunks()
            values = column.flatten().to_numpy().reshape(-1, column.type.list_size)
            labels = table["label"].to_pylist() if "label" in table.column_names else None
            stamps = table["stamp"].to_numpy() if "stamp" in table.column_names else None
            found = cls(table["file"].to_pylist(), values, labels, about, stamps)
            promised = (file.metadata.metadata or {})[_CHECKSUM]
            sound = _Content().add(found).digest() == promised
        except (
            pa.ArrowException, KeyError, ValueError, AttributeError, TypeError, OSError
        ) as error:  # fmt: skip
            why = " ".join(str(error).split())
            raise UserError(f"{path}: damaged, or not written by `maect embed` ({why})") from None
        if not sound:
            raise UserError(f"{path}: damaged (its checksum differs); delete it and embed again")
        return found

    def check(self, encoder: "ImageEncoder", path: Path) -> None:
        """Refuse an encoder whose vectors cannot be compared: other weights, or another resize."""
        for key, what in (("encoder_sha256", "encoder than"), ("resize", "resize than that of")):
            if self.about.get(key) != encoder.about[key]:
                folder = encoder.path.parent
                raise UserError(f"{path}: made with another {what} {folder}; embed again, --afresh")

    @property
    def pixels(self) -> Pixels:
        """Return how the images were read."""
        return Pixels.model_validate(self.about.get("pixels", {}))

    def source(self, images: Path | None = None) -> ImageSource:
        """Return where the images are, `images` if they have moved; a UserError if not there."""
        where = images or Path(self.about["images"])
        source = open_images(where, self.about["kind"], self.pixels)[0]
        if images is None:  # copies of images have times of their own
            self.warn_of_changes(source)
        return source

    def warn_of_changes(self, source: ImageSource) -> None:
        """Say how many images have gone, or changed, since their vectors were made."""
        if self.stamps is None:
            return
        now = stamps_of(source, source.listing().entries)
        pairs = zip(self.files, self.stamps, strict=True)
        changed = [name for name, stamp in pairs if now.get(name) != stamp]
        if changed:
            log.warning(
                "%s: %d of %d images are gone or have changed since their vectors were made "
                "(%s first); run `maect embed` again",
                source.path, len(changed), len(self.files), changed[0],
            )  # fmt: skip


def write_vectors(path: Path, parts: Iterable[Vectors]) -> None:
    """Write vectors to a parquet file, one part in memory at a time.

    It has the columns `file`, `vector` (a list of float32) and, where they are given, `label` and
    `stamp`; `about` is JSON under the key `maect` of its metadata.
    """
    import pyarrow as pa
    from pyarrow import parquet

    def table(part: Vectors) -> pa.Table:
        flat = pa.array(np.ascontiguousarray(part.values, np.float32).ravel())
        vectors = pa.FixedSizeListArray.from_arrays(flat, part.values.shape[1])
        columns = {"file": pa.array(part.files, pa.string()), "vector": vectors}
        if part.labels is not None:
            columns["label"] = pa.array(part.labels, pa.string())
        if part.stamps is not None:
            columns["stamp"] = pa.array(part.stamps)
        return pa.table(columns).replace_schema_metadata({"maect": json.dumps(part.about)})

    rest = iter(parts)
    first = next(rest)
    content = _Content()
    schema = table(first).schema
    with atomic_write(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for part in chain([first], rest):
            writer.write_table(table(part))
            content.add(part)
        writer.add_key_value_metadata({_CHECKSUM: content.digest()})


class _Content:
    """Checksum of a file's content: names, numbers, labels, and the encoder that made them."""

    def __init__(self) -> None:
        self._parts = {name: hashlib.sha256() for name in ("file", "vector", "label", "stamp")}
        self._about: dict[str, Any] = {}
        self._shape = [0, 0]

    def add(self, part: Vectors) -> "_Content":
        """Add a part that comes next."""
        self._parts["vector"].update(np.ascontiguousarray(part.values).data)
        if part.stamps is not None:
            self._parts["stamp"].update(np.ascontiguousarray(part.stamps).data)
        for name, texts in (("file", part.files), ("label", part.labels or [])):
            for text in texts:
                self._parts[name].update(json.dumps(text).encode())
        self._shape = [self._shape[0] + len(part.files), part.values.shape[1]]
        self._about = part.about
        return self

    def digest(self) -> bytes:
        """Return it in hex."""
        sums = {name: each.hexdigest() for name, each in self._parts.items()}
        return digest(sums, self._shape, self._about).encode()


def write_rows(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    """Write a CSV file atomically."""
    with (
        atomic_write(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def check_output(path: Path, suffix: str, inputs: Iterable[Path | None]) -> None:
    """Refuse, by a UserError, a file that cannot be written, before its content is made.

    One of the `inputs`, such as the user's table of images, is none that may be written.
    """
    if path.suffix != suffix:
        raise UserError(f"{path}: its name must end with {suffix}")
    read = [one for one in inputs if one and one.exists()]
    if path.exists() and any(path.samefile(one) for one in read):
        raise UserError(f"{path}: is read, and would be replaced; choose another name to write to")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror}") from None


def is_index(path: Path) -> bool:
    """Return whether a file has vectors of `maect embed`; a UserError if it is damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix != SUFFIX or not path.is_file():
        return False
    try:
        return b"maect" in (parquet.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path}: damaged, or no parquet file ({why})") from None


def open_images(
    images: Path, kind: str | None = None, pixels: Pixels | None = None
) -> tuple[ImageSource, str]:
    """Open a folder, archive or table of images, or another `kind`; return source and kind."""
    if not is_there(images):
        raise UserError(f"{images}: no such file or folder; the images are expected there")
    if kind is None:
        kind = kind_of(images) or (Unlabelled.kind if images.is_dir() else None)
        if kind is None:
            raise UserError(
                f"{images}: give a folder, an archive, a table (.csv, .tsv, .parquet), or --kind"
            )
    return open_source(kind, images, pixels=pixels), kind


def parts_of(out: Path) -> Path:
    """Return the folder next to a file with the parts computed before an interruption."""
    return out.with_name(f".{out.name}.parts")


@dataclass(frozen=True)
class Embedded:
    """Result of `embed_into`.

    Attributes:
        kept: of them, vectors that the file had before.
        left_out: why an image is not in it, by its name.
    """

    images: int
    width: int
    kept: int
    left_out: dict[str, str]


def embed_into(
    out: Path,
    encoder: "ImageEncoder",
    images: Path,
    kind: str | None = None,
    batch_size: int | None = None,
    afresh: bool = False,
) -> Embedded:
    """Write the vectors of all images to a file, except those that it already has.

    The file keeps the vectors of images that it has, if the same encoder made them of the same
    folder and the images' files have the size and times that they had then. A
    second call after a break goes on: what it had computed waits beside the file. Memory holds one
    part of `PART` images and, while images are added, the vectors of before.

    Raises:
        UserError: no images or none that can be read, another suffix, or a file of another encoder
            or folder, that `afresh` does not give up.
    """
    check_output(out, SUFFIX, [images])
    work = Work(encoder, images, kind, batch_size)
    if not afresh:
        work.reuse_vectors(out)
    folder = parts_of(out)
    write_vectors(out, work.parts(folder))
    shutil.rmtree(folder, ignore_errors=True)
    kept = sum(entry.name in work.known for entry in work.entries)
    return Embedded(work.count, encoder.width, kept, work.left_out)


UNKNOWN = 0
"""Stamp of an image that is no file, and is computed every time."""


def stamp_of(file: Path) -> int:
    """Return a number of a file's size and times, which differs once the file is another one.

    The time of its content alone would not do: `mv`, `cp -p`, `rsync -a` and archives keep it.
    """
    about = file.stat()
    facts = f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}".encode()
    return int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), signed=True) or 1


def stamps_of(source: ImageSource, entries: Iterable[Entry]) -> dict[str, int]:
    """Return the stamp of each image's file, or of its archive, by the image's name."""
    found = {}
    for entry in entries:
        paths = (source.root / source.file_of(entry), source.path)
        found[entry.name] = next((stamp_of(path) for path in paths if path.is_file()), UNKNOWN)
    return found


PART = 512
"""Images that are computed and kept as one: what a break costs at most."""


class Work:
    """Images to compute vectors of, and known facts about them.

    Attributes:
        count: how many could be read so far.
        left_out: why an image has none, by its name.
    """

    def __init__(
        self, encoder: "ImageEncoder", images: Path, kind: str | None, batch_size: int | None
    ) -> None:
        self.encoder = encoder
        self.path = images
        self.batch_size = batch_size or encoder.batch_size
        self.source, kind = open_images(images, kind, encoder.reading)
        listing = self.source.listing()
        if listing.ignored:
            log.info("%s: files left out, by suffix: %s", images, listing.left_out)
        self.entries = [entry for entry in listing.entries if is_utf8(entry.name)]
        names = [entry.name for entry in listing.entries]
        self.left_out = {name: "its name is not UTF-8" for name in names if not is_utf8(name)}
        self.listed = len(names)
        self.count = 0
        self.named = listing.class_names
        self.about = {**encoder.about, "images": str(images.resolve()), "kind": kind}
        self.known: dict[str, Array] = {}

    def reuse_vectors(self, out: Path) -> None:
        """Take over the vectors of a file as far as they are those of the same images.

        UserError: it has those of another encoder or folder, which may have taken hours.
        """
        if not out.is_file():
            return
        before = Vectors.read(out)
        for key in (key for key in before.about | self.about if key != "run"):
            then = before.about.get(key)
            now = self.about.get(key)
            if then != now:
                raise UserError(
                    f"{out}: made with {key} {then}, and this is {now}: name another file with "
                    "--out, or replace it with --afresh"
                )
        rows = {name: row for row, name in enumerate(before.files)}
        for entry in self.entries:
            stamp = self.stamps[entry.name]
            if entry.name in rows and before.stamps is not None and stamp != UNKNOWN:
                row = rows[entry.name]
                if before.stamps[row] == stamp:
                    self.known[entry.name] = before.values[row]

    @cached_property
    def stamps(self) -> dict[str, int]:
        """Return the stamp of each image's file before anything is read, by its name."""
        return stamps_of(self.source, self.entries)

    def parts(self, folder: Path) -> Iterator[Vectors]:
        """Yield vectors of the images that can be read, part by part.

        After a break, the parts that were computed wait in the folder.

        Raises:
            UserError: none can be read.
        """
        report = progress(self.path, len(self.entries))
        for start in range(0, len(self.entries), PART):
            entries = self.entries[start : start + PART]
            todo = [entry for entry in entries if entry.name not in self.known]
            facts = [[entry.name, self.stamps[entry.name]] for entry in todo]
            file = folder / f"{digest(self.about, facts)}.safetensors"

            def say(done: int, start: int = start) -> None:
                report(start + done)

            values, faults = self.encoder.kept(file, self.source, todo, self.batch_size, say)
            self.left_out |= {todo[number].name: why for number, why in faults.items()}
            read = (entry.name for number, entry in enumerate(todo) if number not in faults)
            found = self.known | dict(zip(read, values, strict=True))
            names = [entry.name for entry in entries if entry.name in found]
            rows = np.array([found[name] for name in names], np.float32)
            labels = (
                [self.named[e.label] for e in entries if e.name in found] if self.named else None
            )
            stamped = np.array([self.stamps[name] for name in names], np.int64)
            self.count += len(names)
            if names:
                yield Vectors(names, rows, labels, self.about, stamped)
        self.encoder.warn(self.path)
        if not self.count:
            name, why = next(iter(self.left_out.items()))
            raise UserError(
                f"{self.path}: none of {self.listed} images can be read: {name} ({why})"
            )


def nearest(index: Vectors, queries: Array, count: int) -> tuple[Array, NDArray[np.int64]]:
    """Return the images most similar to each query [q, width], most similar first.

    Returns:
        Similarities, float32 [q, count]: cosines of vectors that are standardised as the index is,
        1 of equal images, 0 of two that are as alike as any. And positions in the index,
        int64 [q, count]; of equal similarities the first in the index comes first.
    """
    scale = scale_of(index.values)
    similarity = comparable(queries, scale) @ comparable(index.values, scale).T
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(similarity, order, axis=1), order
