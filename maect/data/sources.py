"""Where images come from: each kind of source lists its images, the rest treats them alike.

Kinds:
  folder              SOURCE/CLASS/IMAGE, at any depth below CLASS; labels are sorted class names
  unlabelled          images at any depth below SOURCE
  imagenet            folders named by WordNet id: ImageNet-1k unpacked, ImageNet-R, -A, -Sketch
  imagenet_train_tar  ILSVRC2012_img_train.tar as distributed
  imagenet_val        ILSVRC2012_img_val.tar or its images in a folder, with --labels
  imagenet_v2         folders 0 to 999 of one of ImageNet-V2's three variants
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError
from maect.data.images import SUFFIXES

UNLABELLED = -1


@dataclass(frozen=True, slots=True)  # a million of them are in memory at once
class Entry:
    """One image: its name below the source, its label, and where its bytes are.

    `offset` -1 stands for the whole file; otherwise the bytes lie inside a tar.
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


def read_entry(root: Path, entry: Entry) -> bytes:
    """The bytes of an image.

    Raises:
        OSError: the file is gone or unreadable.
    """
    with open(root / entry.path, "rb") as file:
        if entry.offset < 0:
            return file.read()
        return os.pread(file.fileno(), entry.size, entry.offset)


def list_source(source: Path, kind: str, labels: Path | None = None) -> Listing:
    """All images of a source, sorted by name.

    Raises:
        UserError: unknown kind, missing or empty folder, empty class, wrong labels.
    """
    lister = _lister(kind)
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; the images are expected there")
    listing = lister(source, labels)
    if not listing.entries:
        raise UserError(f"{source}: no images found (kind {kind})")
    return listing


def walk_images(root: Path) -> Iterator[tuple[str, bool]]:
    """Names relative to `root`, sorted, and whether each looks like an image; hidden ones not.

    Raises:
        UserError: a link leads back to a folder that it lies in.
    """
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (os.path.join(folder, name) for name in folders):
            # What `ln -s DATA LINK` leaves inside DATA when LINK exists already.
            if os.path.islink(path) and _is_in(folder, path):
                raise UserError(f"{path}: a link to a folder that it lies in; remove it")
        for name in sorted(files):
            if not name.startswith("."):
                relative = os.path.relpath(os.path.join(folder, name), root)
                yield relative, os.path.splitext(name)[1].lower() in SUFFIXES


def _is_in(folder: str, other: str) -> bool:
    inner, outer = os.path.realpath(folder), os.path.realpath(other)
    return os.path.commonpath([inner, outer]) == outer


def class_folders(source: Path) -> list[str]:
    """Sorted names of the folders in `source`.

    Raises:
        UserError: `source` is no folder or has no folders.
    """
    if not source.is_dir():
        raise UserError(f"{source}: not a folder")
    names = sorted(e.name for e in os.scandir(source) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise UserError(f"{source}: no class folders (expected {source}/CLASS/IMAGE)")
    return names


def list_classes(source: Path, folders: list[tuple[str, int]], class_names: list[str]) -> Listing:
    """Images in class folders, given each folder's label.

    Raises:
        UserError: a class without images.
    """
    entries: list[Entry] = []
    ignored: list[str] = []
    for folder, label in folders:
        before = len(entries)
        for name, is_image in walk_images(source / folder):
            name = f"{folder}/{name}"
            if is_image:
                entries.append(Entry(name, label, name))
            else:
                ignored.append(name)
        if len(entries) == before:
            raise UserError(f"{source / folder}: class folder without images; remove or fill it")
    return Listing(entries, class_names, ignored)


def _list_folder(source: Path, _: Path | None) -> Listing:
    names = class_folders(source)
    return list_classes(source, [(name, label) for label, name in enumerate(names)], names)


def _list_unlabelled(source: Path, _: Path | None) -> Listing:
    found = list(walk_images(source))
    entries = [Entry(name, UNLABELLED, name) for name, is_image in found if is_image]
    return Listing(entries, [], [name for name, is_image in found if not is_image])


KINDS = (
    "folder",
    "unlabelled",
    "imagenet",
    "imagenet_train_tar",
    "imagenet_val",
    "imagenet_v2",
)


def _lister(kind: str) -> Callable[[Path, Path | None], Listing]:
    # Imported here: that module builds on this one.
    from maect.data import imagenet

    listers = {
        "folder": _list_folder,
        "unlabelled": _list_unlabelled,
        "imagenet": imagenet.list_imagenet,
        "imagenet_train_tar": imagenet.list_train_tar,
        "imagenet_val": imagenet.list_val,
        "imagenet_v2": imagenet.list_v2,
    }
    if kind not in listers:
        raise UserError(f"unknown kind of source {kind!r}; known: {', '.join(KINDS)}")
    return listers[kind]
