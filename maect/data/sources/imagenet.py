"""ImageNet-1k and its relatives as they are distributed; labels number the 1,000 classes."""

import csv
import importlib.util
import io
import tarfile
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from maect.core.errors import UserError
from maect.data.sources.archives import tar_members
from maect.data.sources.base import (
    UNLABELLED,
    Entry,
    ImageSource,
    Listing,
    class_folders,
    list_classes,
    text_lines,
    walk_images,
)

_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_META = "data/meta.mat"
_VAL_NAME = "ILSVRC2012_val_{:08d}.JPEG"


@cache
def imagenet_classes() -> tuple[str, ...]:
    """Return the WordNet ids of the 1,000 classes in the usual (sorted) order, from timm."""
    # Found without importing timm, which would bring torch along.
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise UserError("timm is not installed; it brings the list of ImageNet's classes")
    path = Path(spec.origin).parent / "data/_info/imagenet_synsets.txt"
    names = tuple(path.read_text(encoding="utf-8").split())
    if len(names) != 1000 or list(names) != sorted(names):
        raise UserError(f"{path}: not the 1,000 sorted classes of ImageNet-1k")
    return names


def _label(wnid: str, where: str) -> int:
    classes = imagenet_classes()
    label = bisect_left(classes, wnid)  # they are sorted
    if classes[label : label + 1] != (wnid,):
        raise UserError(f"{where}: {wnid!r} is none of ImageNet's 1,000 classes")
    return label


class ImageNet(ImageSource):
    """Unpacked train or val, ImageNet-R, -A, -Sketch."""

    kind = "imagenet"
    about = "folders named by WordNet id: ImageNet-1k unpacked, ImageNet-R, -A, -Sketch"

    def list_images(self) -> Listing:
        """List images class by class."""
        folders = [(name, _label(name, str(self.path))) for name in class_folders(self.path)]
        return list_classes(self.path, folders, [*imagenet_classes()])

    def folder_names(self) -> Sequence[str] | None:
        """Return the class folders, if the source is a folder."""
        return class_folders(self.path) if self.path.is_dir() else None


class ImageNetTrainTar(ImageSource):
    """ImageNet-1k's training images as they are downloaded; nothing is unpacked."""

    kind = "imagenet_train_tar"
    about = "ILSVRC2012_img_train.tar as distributed, a tar of one tar per class"

    def list_images(self) -> Listing:
        """List images class by class."""
        entries: list[Entry] = []
        with open(self.path, "rb") as file:
            inner = sorted(
                (Path(name).stem, offset)
                for name, offset, _ in tar_members(file, 0, str(self.path))
            )
            for wnid, offset in inner:
                label = _label(wnid, str(self.path))
                images = sorted(tar_members(file, offset, f"{self.path}: {wnid}.tar"))
                if not images:
                    raise UserError(f"{self.path}: {wnid}.tar holds no images")
                entries += [Entry(f"{wnid}/{n}", label, self.path.name, o, s) for n, o, s in images]
        return Listing(entries, [*imagenet_classes()], [])


class ImageNetVal(ImageSource):
    """ImageNet-1k's validation images as they are downloaded; their labels come in the devkit."""

    kind = "imagenet_val"
    about = "ILSVRC2012_img_val.tar or its images in a folder, with `labels`"
    takes = (*ImageSource.takes, "labels")
    needs = ("labels",)

    def list_images(self) -> Listing:
        """List images by name."""
        known = None if self.labels is None else read_labels(self.labels)
        entries = []
        for name, path, offset, size in self._images():
            label = UNLABELLED if known is None else known.get(Path(name).stem)
            if label is None:
                raise UserError(f"{self.labels}: no label for {name}")
            entries.append(Entry(name, label, path, offset, size))
        return Listing(entries, [] if known is None else [*imagenet_classes()], [])

    def _images(self) -> list[tuple[str, str, int, int]]:
        """Return name, file, offset and size of each image."""
        if self.path.is_dir():
            return [(name, name, -1, -1) for name, is_image in walk_images(self.path) if is_image]
        with open(self.path, "rb") as file:
            members = sorted(tar_members(file, 0, str(self.path)))
        return [(name, self.path.name, offset, size) for name, offset, size in members]


class ImageNetV2(ImageSource):
    """Folders "0" to "999" are labels; sorted as names they would be wrong."""

    kind = "imagenet_v2"
    about = "folders 0 to 999 of one of ImageNet-V2's three variants"

    def list_images(self) -> Listing:
        """List images class by class."""
        names = class_folders(self.path)
        wrong = [name for name in names if not name.isdecimal() or int(name) > 999]
        if wrong:
            raise UserError(f"{self.path}: folder {wrong[0]!r}; ImageNet-V2 has folders 0 to 999")
        folders = [(name, label) for label, name in sorted((int(name), name) for name in names)]
        return list_classes(self.path, folders, [*imagenet_classes()])


def read_labels(path: Path) -> dict[str, int]:
    """Read labels by image name without extension.

    Args:
        path: the devkit as distributed (.tar.gz), or a text file with lines `name label`, separated
            by white space or commas; a label is 0 to 999 or a WordNet id.
    """
    if path.suffix in (".gz", ".tgz", ".tar"):
        return _devkit_labels(path)
    labels = {}
    for number, line in enumerate(text_lines(path), 1):
        words = next(csv.reader([line.replace(",", " ")], delimiter=" ", skipinitialspace=True), [])
        if not words or words[0] == "ImageId":  # the header of the Kaggle list
            continue
        if len(words) < 2:
            raise UserError(f"{path}:{number}: expected `name label`")
        name, label = words[0].removesuffix(".JPEG"), words[1]
        labels[name] = int(label) if label.isdecimal() else _label(label, f"{path}:{number}")
        if labels[name] > 999:
            raise UserError(f"{path}:{number}: label {label} is above 999")
    return labels


def _devkit_labels(path: Path) -> dict[str, int]:
    """Read labels of the devkit, which numbers classes in an order of its own (meta.mat)."""
    from scipy.io import loadmat

    try:
        with tarfile.open(path) as tar:
            folders = {name.split("/data/")[0] for name in tar.getnames() if "/data/" in name}
            root = min(folders, default="")
            meta = io.BytesIO(_content(tar, f"{root}/{_META}"))
            synsets = loadmat(meta, squeeze_me=True)["synsets"]
            numbers = _content(tar, f"{root}/{_GROUND_TRUTH}").split()
    except (tarfile.TarError, zlib.error, KeyError, ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: not the ImageNet devkit ({error})") from None
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    return {
        Path(_VAL_NAME.format(i)).stem: _label(wnids[int(number)], str(path))
        for i, number in enumerate(numbers, 1)
    }


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    """Return a member's bytes; KeyError if there is none, ValueError if it is no file."""
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file.read()
