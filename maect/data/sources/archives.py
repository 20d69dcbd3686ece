"""Read images in archives without unpacking: zip, tar, and the tars of webdataset."""

import logging
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import IO

from maect.core.errors import UserError, counted
from maect.data.sources.base import (
    SUFFIXES,
    UNLABELLED,
    Entry,
    ImageSource,
    Listing,
    files_of,
    read_list,
    short_names,
)

log = logging.getLogger(__name__)

_MOST_CLASSES = 1 << 20
Member = tuple[str, int, int]
"""Name, offset and size of a file in a tar."""


class Archive(ImageSource):
    """Labels number the class folders in the order of their names."""

    kind = "archive"
    about = "a .zip or .tar of CLASS/IMAGE, or of images without folders, which have no labels"

    def list_images(self) -> Listing:
        """List images by name; folders that contain all images are no class."""
        if self._archive is not None:
            files = (info.filename for info in self._archive.infolist() if not info.is_dir())
            members = [(name, -1, -1) for name in files]
        else:
            with open(self.path, "rb") as file:
                members = tar_members(file, 0, str(self.path))
        # What macOS and hidden files leave behind in archives is no part of the images.
        hidden = re.compile(r"(^|/)(\.(?!/)|__MACOSX)")
        members = sorted(members, key=_plain_name)
        members = [one for one in members if not hidden.search(one[0])]
        images = [one for one in members if is_image(one[0])]
        names = [_plain_name(one) for one in images]
        shared = _shared_folder(names)
        below = [name[len(shared) :] for name in names]
        loose = sum("/" not in name for name in below)
        sorted_in = 2 * loose < len(below)
        if loose and sorted_in:
            what = counted(loose, "image")
            log.warning("%s: left out: %s in no class folder", self.path, what)
            kept = [pair for pair in zip(below, images, strict=True) if "/" in pair[0]]
            below, images = map(list, zip(*kept, strict=True))
            below = [name.removeprefix(_shared_folder(below)) for name in below]
        classes = sorted({name.split("/")[0] for name in below}) if sorted_in else []
        labels = {name: label for label, name in enumerate(classes)}
        entries = []
        for short, (name, offset, size) in zip(below, images, strict=True):
            label = labels.get(short.split("/")[0], UNLABELLED)
            path = name if self._archive is not None else self.path.name
            entries.append(Entry(short, label, path, offset, size))
        return Listing(entries, classes, [name for name, *_ in members if not is_image(name)])

    def file_of(self, entry: Entry) -> str:
        """Return the archive's name."""
        return self.path.name

    def read(self, entry: Entry) -> bytes:
        """Read the unpacked bytes; a zip has a lock of its own."""
        if self._archive is None:
            return super().read(entry)
        try:
            return self._archive.read(entry.path)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise OSError(0, str(error)) from None  # damaged, packed otherwise, or encrypted
        except (zlib.error, lzma.LZMAError, EOFError) as error:
            raise OSError(0, f"damaged ({error})") from None

    @cached_property
    def _archive(self) -> zipfile.ZipFile | None:
        """Open the zip; return None for a tar."""
        if tarfile.is_tarfile(self.path) and not zipfile.is_zipfile(self.path):
            with open(self.path, "rb") as file:
                if file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
                    raise UserError(
                        f"{self.path}: images cannot be picked out of a compressed tar; unpack "
                        "it, or make it a plain .tar"
                    )
            return None
        try:
            return zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path}: neither a zip nor a tar ({error})") from None


class WebDataset(ImageSource):
    """Samples of an image and, if labelled, a class: KEY.jpg and KEY.cls."""

    kind = "webdataset"
    about = (
        "a folder of webdataset's tars, one of them, or a pattern (DIR/train-*.tar); `labels` may "
        "be a file of the classes' names, one a line"
    )
    takes = (*ImageSource.takes, "labels")

    def list_images(self) -> Listing:
        """List samples tar by tar; the tar's name goes before names that recur in other tars."""
        samples: list[tuple[str, str, int, int, str | None]] = []
        ignored: list[str] = []
        for tar in files_of(self.path, ".tar"):
            where = str(tar.relative_to(self.root))
            with open(tar, "rb") as file:
                grouped = defaultdict[str, list[Member]](list)
                for name, offset, size in tar_members(file, 0, str(tar)):
                    grouped[sample_key(name)].append((name, offset, size))
                for key, members in grouped.items():
                    images = [member for member in members if is_image(member[0])]
                    if not images or key.rpartition("/")[2] == "":  # hidden, as for webdataset
                        ignored += [f"{where}/{name}" for name, *_ in members]
                        continue
                    files = [name for name, *_ in members]
                    if len(set(files)) < len(files):
                        name = max(files, key=files.count)
                        raise UserError(f"{tar}: holds {name!r} twice; make it with one of them")
                    image = name, offset, size = _choose_member(images, key, tar, "images")
                    ignored += [f"{where}/{other[0]}" for other in images if other != image]
                    label = _read_class(file, members, key, tar)
                    samples.append((name, where, offset, size, label))
        names = [name for name, *_ in samples]
        if len(set(names)) < len(names):
            tars = short_names(dict.fromkeys(where for _, where, *_ in samples))
            names = [f"{tars[where]}/{name}" for name, where, *_ in samples]
        labels, classes = self._labels([sample[4] for sample in samples])
        entries = [
            Entry(name, label, where, offset, size)
            for name, label, (_, where, offset, size, _) in zip(names, labels, samples, strict=True)
        ]
        return Listing(entries, classes, ignored)

    def _labels(self, given: list[str | None]) -> tuple[list[int], list[str]]:
        """Return the label of each sample and the classes' names; numbers are labels."""
        known = [text for text in given if text is not None]
        if not known:
            return [UNLABELLED] * len(given), []
        if len(known) < len(given):
            raise UserError(
                f"{self.path}: {len(given) - len(known)} of {len(given)} samples have no class"
            )
        if not all(text.isdecimal() for text in known):
            if self.labels:
                fault = "names classes, but the samples have names of their own; leave it out"
                raise UserError(f"{self.labels}: {fault}")
            classes = sorted(set(known))
            numbers = {name: number for number, name in enumerate(classes)}
            return [numbers[text] for text in known], classes
        numbered = [int(text) for text in known]
        most = max(numbered) + 1
        if most > _MOST_CLASSES:
            raise UserError(f"{self.path}: a class is numbered {most - 1}: they count from 0")
        classes = read_list(self.labels) if self.labels else [str(n) for n in range(most)]
        if most > len(classes):
            raise UserError(f"{self.labels}: {len(classes)} names, but there is a class {most - 1}")
        return numbered, classes


def is_image(name: str) -> bool:
    """Return whether a name looks like an image's."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def sample_key(name: str) -> str:
    """Return the key of a webdataset's sample: a member's name up to its first dot."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _plain_name(member: Member) -> str:
    """Return a member's name: a.png, also where the archive calls it ./a.png."""
    return os.path.normpath(member[0])


def _shared_folder(names: list[str]) -> str:
    """Return the folders that contain all names, with a slash at the end."""
    first = min(names, default="").split("/")
    last = max(names, default="").split("/")
    shared = 0
    while shared < min(len(first), len(last)) - 1 and first[shared] == last[shared]:
        shared += 1
    return "".join(f"{part}/" for part in first[:shared])


def _choose_member(members: list[Member], key: str, where: Path, what: str) -> Member:
    """Return the only one of a sample's members of a kind, or the one named KEY.EXTENSION.

    Raises:
        UserError: there are several, and none or more than one with such a name.
    """
    plain = [one for one in members if len(members) == 1 or one[0].count(".", len(key)) == 1]
    if len(plain) != 1:
        names = ", ".join(name for name, *_ in members)
        raise UserError(
            f"{where}: sample {key!r} has several {what} ({names}); "
            f"make the tar with one of them, or name that one alone {key}.EXTENSION"
        )
    return plain[0]


def _read_class(file: IO[bytes], members: list[Member], key: str, where: Path) -> str | None:
    """Read the class from a sample's .cls file; None: no file, an empty one, or -1."""
    classes = [member for member in members if member[0].endswith(".cls")]
    if not classes:
        return None
    _, offset, size = _choose_member(classes, key, where, "classes")
    text = os.pread(file.fileno(), min(size, 1000), offset)
    name = text.decode("utf-8", "replace").strip()
    return None if name in ("", str(UNLABELLED)) else name


def tar_members(file: IO[bytes], offset: int, where: str) -> list[Member]:
    """Return name, offset in `file` and size of each file of a tar that starts at `offset`."""
    length = os.fstat(file.fileno()).st_size
    file.seek(offset)
    members: list[Member] = []
    try:
        # tarfile counts from where the file stands, so offsets are those of the outer file.
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                # A negative size would lead back, and round and round.
                if not 0 <= member.size <= length - member.offset_data:
                    raise tarfile.ReadError(f"{member.name!r} has an impossible size")
                if member.isfile():
                    members.append((member.name, member.offset_data, member.size))
                elif (member.issym() or member.islnk()) and is_image(member.name):
                    raise UserError(
                        f"{where}: {member.name} is a link; make the tar with --dereference and "
                        "--hard-dereference"
                    )
            # Where another member could begin and nothing does, tarfile sees no fault.
            if not os.pread(file.fileno(), 1, tar.offset):
                raise tarfile.ReadError(
                    "no blocks of zeros at its end; if nothing is missing, truncate -s +1024 it"
                )
    except (tarfile.TarError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise UserError(f"{where}: not a complete tar ({error}); download it again") from None
    return members
