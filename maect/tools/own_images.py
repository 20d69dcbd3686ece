"""What somebody's own images are: where the splits lie, whether folders are classes, how large."""

import hashlib
import math
import os
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maect.core.errors import UserError
from maect.data.decode import UnreadableError, read_rgb
from maect.data.sources import UNLABELLED, Entry
from maect.data.sources.base import SUFFIXES, is_utf8, walk_images
from maect.data.sources.files import Folder, Unlabelled

# Names of the folders of a split, in any case and with - or blanks for _; the first that is there.
TRAIN = ("train", "training", "training_set", "train_set")
VAL = ("val", "valid", "validation", "val_set", "validation_set", "test", "testing", "test_set")
LOOKED_AT = 200
GRAY = 8  # levels that the channels of a grey JPEG may differ by
FEWEST, FEWEST_VAL = 200, 20
HELD_OUT = (10, 5, 3, 2)  # one image in so many, the first of them that gives enough


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder that have images, sorted."""
    # scandir knows what is a folder without asking for each of a million files.
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    inside = [folder / name for name in names]
    return [path for path in inside if any(is_image for _, is_image in walk_images(path))]


def has_loose(folder: Path) -> bool:
    """Whether images lie in a folder itself."""
    return any(
        e.is_file() and os.path.splitext(e.name)[1].lower() in SUFFIXES
        for e in os.scandir(folder)
        if not e.name.startswith(".")
    )


def descend(folder: Path, classes: Collection[str] = ()) -> Path:
    """Through folders that hold everything in one folder, unless it is a class."""
    while not has_loose(folder) and len(inside := folders_in(folder)) == 1:
        if inside[0].name in classes:
            break
        folder = inside[0]
    return folder


def find_splits(folder: Path) -> tuple[Path, Path | None]:
    """Folders of the images to train on and of those to evaluate on; None: some are to be held out.

    Raises:
        UserError: no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    folder = descend(folder)
    inside = {
        path.name.lower().replace("-", "_").replace(" ", "_"): path for path in folders_in(folder)
    }
    train = next((inside[name] for name in TRAIN if name in inside), None)
    val = next((inside[name] for name in VAL if name in inside), None)
    # A folder of trains beside planes is a class.
    if train is None or (val is None and not folders_in(train)):
        return folder, None
    return descend(train), val


@dataclass(frozen=True)
class Images:
    """One split's images, and what some of them look like."""

    folder: Path
    kind: str
    entries: list[Entry]
    class_names: list[str]
    loose: int
    """Images beside class folders: for their sake there are no labels."""
    side: int
    """Median of the shorter sides, in pixels."""
    colored: bool
    bytes_each: float

    @property
    def classes(self) -> Counter[int]:
        """Number of images of each class; empty without labels."""
        return Counter(entry.label for entry in self.entries if entry.label != UNLABELLED)


def _check_name(folder: str, name: str) -> None:
    """A name that an experiment, and a list of names, one a line, can hold."""
    where = folder.encode(errors="backslashreplace").decode()
    if not is_utf8(folder + name):
        raise UserError(f"{where}: the name {name!r} is not UTF-8; rename it")
    if (folder + name).splitlines() != [folder + name]:
        raise UserError(f"{where}: the name {name!r} contains a line break; rename it")


def look_at(folder: Path, fewest: int = FEWEST) -> Images:
    """List a folder's images (`CLASS/IMAGE`, or without classes) and open some of them.

    Raises:
        UserError: no images, too few, or a file that cannot be read.
    """
    top = {name.partition("/")[0] for name, is_image in walk_images(folder) if is_image}
    classes = [name for name in top if (folder / name).is_dir()]
    sorted_in = len(classes) > 1 and len(classes) == len(top)
    loose = len(top) - len(classes) if len(classes) > 1 else 0
    source = Folder(folder) if sorted_in else Unlabelled(folder)
    listing = source.listing()
    entries = listing.entries
    for entry in entries:
        _check_name(str(folder), entry.name)
    if len(entries) < fewest:
        raise UserError(f"{folder}: {len(entries)} images; at least {fewest} are needed")
    sides, colors, sizes = [], [], []
    for entry in entries[:: math.ceil(len(entries) / LOOKED_AT)]:
        try:
            data = source.read(entry)
            image = read_rgb(data)
        except (OSError, UnreadableError) as error:
            fault = f"{folder / entry.name}: cannot be read as an image ({error})"
            raise UserError(f"{fault}; repair or remove it") from None
        sides.append(min(image.size))
        small = np.asarray(image.resize((8, 8)), np.int16)
        colors.append(int(np.ptp(small, axis=2).max()) > GRAY)
        sizes.append(len(data))
    side = int(statistics.median(sides))
    size = statistics.fmean(sizes)
    return Images(folder, source.kind, entries, listing.class_names, loose, side, any(colors), size)


def check_same_classes(train: Images, val: Images) -> None:
    """What is trained on and what is evaluated on have the same classes.

    Raises:
        UserError: classes on one side only; it says which.
    """
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


def held_out(images: Images) -> set[str]:
    """Names of about one image in ten of every class, chosen by a hash of the name.

    More of them where the classes are so small that there would be too few to evaluate on.

    Raises:
        UserError: too few all the same.
    """
    by_label: dict[int, list[str]] = {}
    for entry in images.entries:
        by_label.setdefault(entry.label, []).append(entry.name)
    for names in by_label.values():
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen: set[str] = set()
    for part in HELD_OUT:
        for names in by_label.values():
            chosen.update(names[: max(len(names) // part, int(len(names) > 1))])
        if len(chosen) >= FEWEST_VAL:
            return chosen
    raise UserError(
        f"{images.folder}: only {len(chosen)} images can be held out, since most of the "
        f"{len(by_label)} classes have one image; {FEWEST_VAL} are needed: add a folder val "
        "beside train"
    )
