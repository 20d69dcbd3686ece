"""Inspection of somebody's own images: where splits lie, whether folders are classes, sizes."""

import hashlib
import logging
import math
import os
import statistics
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from maect.answers.duplicates import groups_of, read_images
from maect.core.errors import UserError, counted
from maect.data.convert import Inspected, inspect_image, scaled
from maect.data.decode import UnreadableError
from maect.data.sources import kind_of, open_source
from maect.data.sources.archives import Archive
from maect.data.sources.base import (
    SUFFIXES,
    UNLABELLED,
    Entry,
    ImageSource,
    as_utf8,
    is_utf8,
    walk_images,
)
from maect.data.sources.image_files import Folder, Unlabelled
from maect.evaluate import outcomes
from maect.recipes import WHITE, Pixels

log = logging.getLogger(__name__)

# Names of the folders of a split, in any case and with - or blanks for _; the first that is there.
TRAIN = ("train", "training", "training_set", "train_set")
VAL = ("val", "valid", "validation", "val_set", "validation_set")
TEST = ("test", "testing", "test_set")
INSPECTED = 200
GRAY = 8  # levels that the channels of a grey JPEG may differ by
FEWEST = 200
FEWEST_VAL = 20
MOST_NEAR = 50_000
"""Images that are decoded to find near-duplicates."""
HELD_OUT = (10, 5, 3, 2)  # one image in this many, the first of them that gives enough


def _plain(name: str) -> str:
    """Return a folder's name in the spelling of splits."""
    return name.lower().replace("-", "_").replace(" ", "_")


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that have images, sorted."""
    # scandir knows what is a folder without asking for each of a million files.
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    inside = [folder / name for name in names]
    return [path for path in inside if any(is_image for _, is_image in walk_images(path))]


def has_loose(folder: Path) -> bool:
    """Return whether images lie in a folder itself."""
    return any(
        e.is_file() and os.path.splitext(e.name)[1].lower() in SUFFIXES
        for e in os.scandir(folder)
        if not e.name.startswith(".")
    )


def descend(folder: Path, classes: Collection[str] = ()) -> Path:
    """Descend through folders that hold a single folder, unless it is a class or packed."""
    if not folder.is_dir() or kind_of(folder) is not None:
        return folder
    while not has_loose(folder) and len(inside := folders_in(folder)) == 1:
        if inside[0].name in classes:
            break
        folder = inside[0]
    return folder


Splits = tuple[Path, Path | None, Path | None]


def find_splits(folder: Path) -> Splits:
    """Return where the images are to train on, to evaluate on, and to keep aside.

    Without the second some have to be held out; the third there is only beside it: a test split
    that nothing else stands beside is what is evaluated on.

    Raises:
        UserError: no such folder.
    """
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    for place in (folder, folder / "data"):  # as Hugging Face's data sets lie
        if place.exists() and kind_of(place) is not None:
            return _packed_splits(place) if place.is_dir() else (place, None, None)
    if not folder.is_dir():
        raise UserError(f"{folder}: neither a folder nor an archive or table of images")
    folder = descend(folder)
    inside: dict[str, Path] = {}
    for path in folders_in(folder):
        other = inside.setdefault(_plain(path.name), path)
        if other != path and _plain(path.name) in (*TRAIN, *VAL, *TEST):
            raise UserError(f"{path}: {other.name} is there, too; rename one of them")
    train, val, test = (
        next((inside[name] for name in names if name in inside), None)
        for names in (TRAIN, VAL, TEST)
    )
    # A folder of trains beside planes is a class.
    if train is None or (val is None and test is None and not folders_in(train)):
        return folder, None, None
    return (descend(train), test, None) if val is None else (descend(train), val, test)


def _packed_splits(folder: Path) -> Splits:
    """Return patterns of tars or tables that are named after splits; else the folder."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".tar", ".parquet"))

    def named(words: tuple[str, ...]) -> Path | None:
        for word in sorted(words, key=len, reverse=True):
            for file in files:
                if file.stem.lower().startswith(word):
                    return folder / f"{file.stem[: len(word)]}*{file.suffix}"
        return None

    train = named(TRAIN)
    val = named(VAL)
    test = named(TEST)
    if train is None:
        return folder, None, None
    return (train, test, None) if val is None else (train, val, test)


@dataclass(frozen=True)
class Images:
    """One split's images, and facts about some of them."""

    folder: Path
    kind: str
    entries: list[Entry]
    class_names: list[str]
    loose: int
    """Number of images outside class folders: because of them there are no labels."""
    side: int
    """Median of the shorter sides, in pixels."""
    colored: bool
    bytes_each: float
    pixels: Pixels
    remarks: tuple[str, ...] = ()
    """Further remarks, a sentence each."""

    @property
    def classes(self) -> Counter[int]:
        """Number of images of each class; empty without labels."""
        return Counter(entry.label for entry in self.entries if entry.label != UNLABELLED)


def _check_name(folder: str, name: str) -> None:
    """Return a name that an experiment, and a list of names, one a line, can hold."""
    where = as_utf8(folder)
    if not is_utf8(folder + name):
        raise UserError(f"{where}: the name {name!r} is not UTF-8; rename it")
    if (folder + name).splitlines() != [folder + name]:
        raise UserError(f"{where}: the name {name!r} contains a line break; rename it")


def inspect_images(
    folder: Path,
    fewest: int = FEWEST,
    *,
    ignore_folders: bool = False,
    skip_unreadable: bool = False,
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> Images:
    """List a folder's images (`CLASS/IMAGE`, or without classes) and open some of them.

    Args:
        folder: or an archive or table of images, or a pattern of such.
        stated: how they are read, as far as somebody says (`Pixels.reading`).

    Raises:
        UserError: no images, too few, or a file that cannot be read.
    """
    source, loose = _source_of(folder, ignore_folders)
    listing = source.listing()
    entries = listing.entries
    found = {_plain(name) for name in listing.class_names}
    if isinstance(source, Archive) and found & {*TRAIN} and found & {*VAL, *TEST}:
        raise UserError(
            f"{folder}: its folders {', '.join(listing.class_names)} are splits and no classes; "
            "unpack it"
        )
    for entry in entries:
        _check_name(str(folder), entry.name)
    if len(entries) < fewest:
        raise UserError(f"{folder}: {len(entries)} images; at least {fewest} are needed")
    inspected = []
    sizes = []
    faults = []
    chosen = entries[:: math.ceil(len(entries) / INSPECTED)]
    for entry in chosen:
        try:
            data = source.read(entry)
            inspected.append(inspect_image(data))
            sizes.append(len(data))
        except (OSError, UnreadableError) as error:
            faults.append(f"{folder / entry.name}: cannot be read as an image ({error})")
    if not inspected or (faults and not skip_unreadable):
        others = counted(len(faults) - 1, "other")
        more = f", nor can {others} of the {len(chosen)} opened" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{more}; repair or remove it, or pass --skip-unreadable")
    pixels, remarks = _pixels(folder, inspected, stated)
    if faults:
        remarks.append(f"{len(faults)} of {len(chosen)} images inspected cannot be read: left out")
    if len(chosen) < len(entries):
        remarks.append(
            f"{len(chosen):,} of {len(entries):,} images were opened: sharding opens all, "
            "and names those that cannot be read"
        )
    if listing.ignored:
        remarks.append(f"Files left out, by suffix: {listing.left_out}")
    return Images(
        folder=folder,
        kind=source.kind,
        entries=entries,
        class_names=listing.class_names,
        loose=loose,
        side=int(statistics.median(min(one.width, one.height) for one in inspected)),
        colored=pixels.channels == 3 and any(one.colors > GRAY for one in inspected),
        bytes_each=statistics.fmean(sizes),
        pixels=pixels,
        remarks=tuple(remarks),
    )


def _source_of(folder: Path, ignore_folders: bool) -> tuple[ImageSource, int]:
    """Return the layout of the images, and how many lie outside class folders."""
    kind = kind_of(folder)
    if kind is not None:
        if ignore_folders:
            raise UserError(f"{folder}: --ignore-folders is for folders of image files")
        return open_source(kind, folder), 0
    top = {name.partition("/")[0] for name, is_image in walk_images(folder) if is_image}
    classes = [name for name in top if (folder / name).is_dir()]
    sorted_in = len(classes) > 1 and len(classes) == len(top) and not ignore_folders
    loose = len(top) - len(classes) if len(classes) > 1 and not ignore_folders else 0
    return (Folder(folder) if sorted_in else Unlabelled(folder)), loose


def _pixels(
    folder: Path, inspected: list[Inspected], stated: Mapping[str, Any]
) -> tuple[Pixels, list[str]]:
    """Return how images like these are read, and why."""
    made: dict[str, Any] = {"orientation": "exif"}
    remarks = []
    if other := sorted(stated.keys() - Pixels().reading):
        raise UserError(f"--pixels {other[0]}: is found by looking at the images; leave it out")
    counts = Counter(3 if one.channels == 1 else one.channels for one in inspected)
    if len(counts) > 1:
        found = " and ".join(f"{n} of {channels}" for channels, n in counts.most_common())
        raise UserError(
            f"{folder}: images of different numbers of channels ({found}); put them into folders "
            "of their own"
        )
    (channels,) = counts
    upright = stated.get("orientation", "exif") == "exif"
    if upright and (turned := sum(one.turned for one in inspected)):
        are = "is turned, as its" if turned == 1 else "are turned, as their"
        remarks.append(f"{turned} of {len(inspected)} images inspected {are} EXIF says")
    if channels == 3:
        made["background"] = WHITE  # nothing of an opaque image
    if deep := [one.values for one in inspected if one.values is not None]:
        low, high = min(low for low, _ in deep), max(high for _, high in deep)
        made["range"] = (low, high if high > low else low + 1)
        start, end = stated.get("range") or made["range"]
        found = f" (the images have {low:g} to {high:g})" if "range" in stated else ""
        remarks.append(f"Values of more than 8 bits: {start:g} to {end:g} become 0 to 255{found}")
    made |= stated
    if channels != 3:
        made["channels"] = channels
    # One odd file among photographs says nothing of the others.
    if len(deep) > len(inspected) / 2 or channels != 3:
        span = made.get("range")
        parts = [scaled(one.sample, span) if one.values else one.sample for one in inspected]
        parts = [part.repeat(channels // part.shape[1], axis=1) for part in parts]
        together = np.concatenate(parts).astype(np.float64) / 255
        mean = together.mean(0).round(4)
        std = together.std(0).round(4).clip(0.01)
        made |= {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
        remarks.append(STATISTICS)
    return Pixels.model_validate(made), remarks


STATISTICS = "Mean and deviation are those of the images inspected"


def check_same_classes(train: Images, val: Images) -> None:
    """Refuse other classes in validation than in training images (UserError)."""
    if train.class_names and not val.class_names:
        raise UserError(
            f"{val.folder}: has no classes, but {train.folder} has; sort the images into the same "
            f"class folders, or pass --images {train.folder} to hold out some of those"
        )
    if not train.class_names or train.class_names == val.class_names:
        return
    missing = sorted({*train.class_names} - {*val.class_names})
    others = sorted({*val.class_names} - {*train.class_names})
    parts = [f"without {', '.join(missing[:3])}"] if missing else []
    parts += [f"with {', '.join(others[:3])}"] if others else []
    raise UserError(
        f"{val.folder}: other classes than {train.folder} ({'; '.join(parts)}); "
        f"make them the same, or pass --images {train.folder} to hold out some of those"
    )


def near_contents(images: Images) -> list[str]:
    """Return a word for each image, a random one; near-duplicates share theirs.

    An image that cannot be read stands for itself.
    """
    source = open_source(images.kind, images.folder, pixels=images.pixels)
    source.listing()
    names = [entry.name for entry in images.entries]
    seen = read_images(source, images.pixels.as_seen, set(names)).images
    groups = groups_of(seen)
    digests: dict[int, str] = {}
    for group, digest in zip(groups, seen.digests, strict=True):
        assert digest is not None  # all were read
        digests[group] = min(digest.hex(), digests.get(group, digest.hex()))
    found = {name: digests[group] for name, group in zip(seen.names, groups, strict=True)}
    # The smallest digest of many images is smaller than that of one: hashed again, it is not.
    return [hashlib.sha256(found.get(name, name).encode()).hexdigest() for name in names]


@dataclass(frozen=True)
class Hashes:
    """Hashes of an image's bytes; of a file that cannot be read those of its name."""

    sha256: str
    crc32: int


def hashes_of(images: Images) -> list[Hashes]:
    """Read every image once; return its hashes."""
    source = open_source(images.kind, images.folder, pixels=images.pixels)
    listed = {entry.name: entry for entry in source.listing().entries}
    found = []
    for entry in images.entries:
        try:
            data = source.read(listed[entry.name])
        except OSError:
            data = entry.name.encode()
        found.append(Hashes(hashlib.sha256(data).hexdigest(), zlib.crc32(data)))
    return found


def choose_validation(images: Images) -> set[str]:
    """Choose about one image in ten of every class by content; return their names.

    Equal images and near-duplicates, such as the frames of a scene, are on one side. More are
    chosen where the classes are so small that there would be too few to evaluate on.

    Raises:
        UserError: too few all the same.
    """
    names = [entry.name for entry in images.entries]
    labels = np.array([entry.label for entry in images.entries])
    for near in (True, False) if len(names) <= MOST_NEAR else (False,):
        contents = near_contents(images) if near else [one.sha256 for one in hashes_of(images)]
        for part in HELD_OUT:
            chosen = set(compress(names, outcomes.held_out_by_content(labels, contents, part)))
            if len(chosen) >= FEWEST_VAL:
                return chosen
        if near:
            log.warning(
                "%s: so many images are nearly the same that they are on both sides of the split: "
                "only equal files are on one; a folder val beside train says otherwise",
                images.folder,
            )
    raise UserError(
        f"{images.folder}: only {len(chosen)} images can be held out, since most of the "
        f"{len(np.unique(labels))} classes have one image; {FEWEST_VAL} are needed: add a "
        "folder val beside train, or pass --ignore-folders to use no classes"
    )
