"""Base classes of the sources, and how image folders are walked.

Listing raises `UserError` for a source without images, an empty class, a name that occurs twice and
labels that do not fit. Reading raises `OSError` for an image that is gone.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar

from maect.core.errors import UserError, counted
from maect.recipes import Pixels

log = logging.getLogger(__name__)

UNLABELLED = -1
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
    | {".heic", ".heif", ".avif", ".jp2", ".j2k", ".jpx", ".dcm"}
)


@dataclass(frozen=True, slots=True)  # a million of them are in memory at once
class Entry:
    """One image: its name below the source, its label, and where its source finds it.

    `path`, `offset` and `size` mean what the source that listed it makes of them. Usually: the
    bytes of the file `path` below the source's folder, all of them if `offset` is -1.
    """

    name: str
    label: int
    path: str
    offset: int = -1
    size: int = -1


@dataclass(frozen=True)
class Listing:
    """Everything a source holds; `ignored` are files that do not look like images."""

    entries: list[Entry]
    class_names: list[str]
    ignored: list[str]

    @property
    def ignored_suffixes(self) -> dict[str, int]:
        """Return how many files are left out, by the end of their names, most first."""
        counts = Counter(os.path.splitext(name)[1].lower() for name in self.ignored)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def left_out(self) -> str:
        """Say how many files are left out, by suffix."""
        return ", ".join(
            f"{n} {end if end.isprintable() else ascii(end)}" if end else f"{n} without"
            for end, n in self.ignored_suffixes.items()
        )


class Source(ABC):
    """A kind of source. Importing one imports neither NumPy nor PyTorch.

    Attributes:
        kind: its name in experiments and after `--kind`.
        about: what SOURCE is, for `maect shard --help`.
        takes: settings of a split that it may be given.
        needs: those of them that must be given.
        sharded: whether its images are written to shards; if not, shards of others are shown.
        numbers: whether their pixels are numbers and no colours: nothing is made ready of them.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    takes: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]] = ()
    sharded: ClassVar[bool]
    numbers: ClassVar[bool] = False


class ImageSource(Source):
    """A source whose images are listed once, shuffled and written to shards.

    Args:
        path: folder or file.
        labels: labels of the images, for the kinds that take them.

    Attributes:
        root: the folder that the paths of entries are below.
        pixels: what the images are: a source that changes them makes them ready before.
    """

    takes: ClassVar[tuple[str, ...]] = ("images", "only", "exclude", "skip_unreadable", "shards")
    sharded = True
    pixels: Pixels | None = None

    def __init__(self, path: Path, labels: Path | None = None) -> None:
        self.path, self.labels = Path(path), labels
        self.root = self.path if self.path.is_dir() else self.path.parent

    @abstractmethod
    def list_images(self) -> Listing:
        """List all images, in an order that only their names decide."""

    def listing(self) -> Listing:
        """Return the listing of `list_images`, made once, if it can be sharded."""
        return self._listing

    @cached_property
    def _listing(self) -> Listing:
        if not is_there(self.path):
            raise UserError(f"{self.path}: no such file or folder; the images are expected there")
        listing = self.list_images()
        if not listing.entries:
            others = f"; files with other suffixes: {listing.left_out}" if listing.ignored else ""
            raise UserError(f"{self.path}: no images found (kind {self.kind}){others}")
        names = Counter(entry.name for entry in listing.entries)
        name, times = names.most_common(1)[0]
        if times > 1:
            raise UserError(f"{self.path}: holds {name!r} {times} times; leave one of them")
        return listing

    def read(self, entry: Entry) -> bytes:
        """Read the bytes of an image file; several threads read at once."""
        with open(self.root / entry.path, "rb") as file:
            if entry.offset < 0:
                return file.read()
            return os.pread(file.fileno(), entry.size, entry.offset)

    def file_of(self, entry: Entry) -> str:
        """Return the name, below the source's folder, of the file that has an image."""
        return entry.path

    def read_ahead(self, entries: Sequence[Entry], folder: Path) -> None:
        """Prepare to read these images next, where one cannot be read without many others.

        `folder` takes files that are needed meanwhile.
        """

    def folder_names(self) -> Sequence[str] | None:
        """Return the names of class folders; None if the images lie in no such folders."""
        return None


class ClassView(Source):
    """Some classes of a split: an index into its shards, which `maect.data.subsets` writes."""

    kind = "view"
    about = "the shards of a split: some of its `classes`, without copying"
    takes = ("of", "classes")
    needs = ("of", "classes")
    sharded = False


# ImageNet-Dogs-15 as the deep clustering literature uses it (Chang et al. 2017).
DOGS15 = (
    "n02085936", "n02086646", "n02088238", "n02091467", "n02097130",
    "n02099601", "n02101388", "n02101556", "n02102177", "n02105056",
    "n02105412", "n02105855", "n02107142", "n02110958", "n02112137",
)  # fmt: skip
CLASS_LISTS = {"dogs15": DOGS15}


def read_classes(text: str) -> tuple[str, ...]:
    """Return the class names of a list in `CLASS_LISTS`, or of a text file, one a line."""
    if text in CLASS_LISTS:
        return CLASS_LISTS[text]
    return tuple(read_list(Path(text)))


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder, or any by a pattern such as `train-*.tar`."""
    return path.exists() or any(path.parent.glob(path.name))


def short_names(files: Iterable[str]) -> dict[str, str]:
    """Return a name for each file: its stem or, where two have the same, its path without suffix.

    Args:
        files: paths relative to one folder.
    """
    paths = {file: PurePosixPath(file) for file in files}
    if len({path.stem for path in paths.values()}) == len(paths):
        return {file: path.stem for file, path in paths.items()}
    return {file: str(path.with_suffix("")) for file, path in paths.items()}


def files_of(path: Path, *suffixes: str) -> list[Path]:
    """Return a file, those that fit a pattern, or all with the suffixes in a folder; by name."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes)
    else:
        files = [path] if path.exists() else sorted(path.parent.glob(path.name))
    if not files:
        raise UserError(f"{path}: no {' or '.join(suffixes)} file there")
    return files


def walk_images(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield names relative to `root`, sorted, and whether each looks like an image.

    Hidden files are left out. Links are followed.
    """
    pending = [""]  # folders still to read: the names below `root`, each with a slash
    while pending:
        below = pending.pop()
        folder = os.path.join(root, below)
        folders = []
        try:
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    yield below + entry.name, os.path.splitext(entry.name)[1].lower() in SUFFIXES
                    continue
                # `ln -s DATA LINK` leaves such a link inside DATA when LINK exists already.
                if entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(
                    os.path.realpath(entry.path)
                ):
                    raise UserError(f"{entry.path}: a link to a folder that it lies in; remove it")
                folders.append(f"{below}{entry.name}/")
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from None
        pending += reversed(folders)


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file; UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason})") from None


def read_list(path: Path) -> list[str]:
    """Read names in a text file, one a line, such as SimCLR's and MSN's low-shot lists."""
    names = [line.strip() for line in text_lines(path) if line.strip()]
    if not names or len(set(names)) != len(names):
        raise UserError(f"{path}: {'names repeat' if names else 'empty'}")
    return names


class EmptyClassError(UserError):
    """A folder of a class has no images."""


def class_folders(source: Path) -> list[str]:
    """Return the sorted names of the folders in `source`."""
    if not source.is_dir():
        raise UserError(f"{source}: not a folder")
    names = sorted(e.name for e in os.scandir(source) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise UserError(f"{source}: no class folders (expected {source}/CLASS/IMAGE)")
    for name in names:
        if not is_utf8(name):
            raise UserError(f"{source}: class folder {name!r}: its name is not UTF-8; rename it")
    return names


def is_utf8(name: str) -> bool:
    """Return whether a file's name can be written to a text file."""
    return name.encode(errors="ignore").decode() == name


def as_utf8(name: str) -> str:
    """Return a file's name with bytes that are not UTF-8 escaped."""
    return name.encode(errors="backslashreplace").decode()


def list_classes(source: Path, folders: list[tuple[str, int]], class_names: list[str]) -> Listing:
    """List the images in class folders, given each folder's label."""
    beside = [e.name for e in os.scandir(source) if not e.is_dir() and not e.name.startswith(".")]
    images = sum(os.path.splitext(name)[1].lower() in SUFFIXES for name in beside)
    if images:
        log.warning("%s: left out: %s in no class folder", source, counted(images, "image"))
    entries: list[Entry] = []
    ignored: list[str] = []
    for folder, label in folders:
        before = len(entries)
        for below, is_image in walk_images(source / folder):
            name = f"{folder}/{below}"
            if is_image:
                entries.append(Entry(name, label, name))
            else:
                ignored.append(name)
        if len(entries) == before:
            raise EmptyClassError(
                f"{source / folder}: class folder without images; remove or fill it"
            )
    return Listing(entries, class_names, ignored)
