"""Sources of images; each kind lists and reads its own.

A new kind is a module here that declares it, and a line in `SOURCES`; experiments, `maect shard`
and its help know it from there.
"""

import tarfile
from pathlib import Path

from maect.core.errors import UserError, entry
from maect.data.sources.archives import Archive, WebDataset
from maect.data.sources.base import SUFFIXES, ClassView, ImageSource, Source, files_of, walk_images
from maect.data.sources.columns import Columns
from maect.data.sources.corrupted import JPEG, Blur, Contrast, Noise, Pixelate
from maect.data.sources.image_files import Folder, ImageList, Masks, Unlabelled
from maect.data.sources.imagenet import ImageNet, ImageNetTrainTar, ImageNetV2, ImageNetVal
from maect.recipes import Pixels

SOURCES: dict[str, type[Source]] = {
    source.kind: source
    for source in (
        Folder,
        Unlabelled,
        Masks,
        ImageList,
        Archive,
        WebDataset,
        Columns,
        ImageNet,
        ImageNetTrainTar,
        ImageNetVal,
        ImageNetV2,
        Noise,
        Blur,
        Contrast,
        Pixelate,
        JPEG,
        ClassView,
    )
}

BUNDLED = {
    "digits": "maect.data.bundled:write_digits",
    "shapes": "maect.data.bundled:write_shapes",
}
"""Functions that write the splits of bundled data sets as image folders."""


def find_source(kind: str) -> type[Source]:
    """Return the source of a kind; UserError with a hint if there is none."""
    return entry(kind, SOURCES, "kind of source")


def open_source(
    kind: str, path: Path, labels: Path | None = None, pixels: Pixels | None = None
) -> ImageSource:
    """Open the images of a folder or file; `pixels` are those of their data set."""
    source = find_source(kind)
    if not issubclass(source, ImageSource):
        raise UserError(f"kind {kind} has no images of its own")
    if labels is not None and "labels" not in source.takes:
        raise UserError(f"kind {kind} takes no `labels`")
    opened = source(path, labels)
    opened.pixels = pixels
    return opened


def kind_of(path: Path) -> str | None:
    """Guess the kind of a file or folder by its name and content.

    Returns:
        None for a folder of image files, with or without class folders, and for anything unknown.
        Archives and tables beside image files do not count.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        packed = {entry.suffix.lower() for entry in path.iterdir() if entry.is_file()}
        if packed & SUFFIXES or not packed & {".tar", ".parquet"}:
            return None
        if any(is_image and "/" in name for name, is_image in walk_images(path)):
            return None
        if ".tar" not in packed:
            return Columns.kind
        tars = files_of(path, ".tar")
        if len(tars) == 1 and not _is_webdataset(tars[0]):
            raise UserError(f"{path}: its tar is not one of webdataset's; give {tars[0]} itself")
        return WebDataset.kind
    if suffix == ".tar":
        return WebDataset.kind if _is_webdataset(files_of(path, suffix)[0]) else Archive.kind
    kinds = {".csv": ImageList, ".tsv": ImageList, ".parquet": Columns, ".zip": Archive}
    return kinds[suffix].kind if suffix in kinds else None


def _is_webdataset(tar: Path) -> bool:
    """Return whether the first samples of a tar have classes of their own."""
    try:
        with tarfile.open(tar, "r:") as file:
            names = [member.name for member, _ in zip(file, range(8), strict=False)]
    except (tarfile.TarError, OSError):
        return False
    return any(name.endswith(".cls") for name in names)
