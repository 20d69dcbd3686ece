"""Where images come from: each kind lists and reads its own, all else treats them alike.

A new kind is a module here that declares it, and a line in `SOURCES`; experiments, `maect shard`
and its help know it from there.
"""

from pathlib import Path

from maect.core.errors import UserError, did_you_mean
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, Listing, Source
from maect.data.sources.corrupted import JPEG, Blur, Contrast, Noise, Pixelate
from maect.data.sources.files import Folder, ImageList, Unlabelled
from maect.data.sources.imagenet import ImageNet, ImageNetTrainTar, ImageNetV2, ImageNetVal
from maect.data.sources.view import ClassView

__all__ = [
    "BUNDLED",
    "SOURCES",
    "UNLABELLED",
    "Entry",
    "ImageSource",
    "Listing",
    "Source",
    "find_source",
    "open_source",
]

SOURCES: dict[str, type[Source]] = {
    source.kind: source
    for source in (
        Folder,
        Unlabelled,
        ImageList,
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

BUNDLED = {"digits": "maect.data.digits:write_digits"}
"""Datasets that come with a library, by kind: what writes their splits as image folders."""


def find_source(kind: str) -> type[Source]:
    """The source of a name.

    Raises:
        UserError: there is none.
    """
    if kind not in SOURCES:
        raise UserError(f"unknown kind of source {kind!r}; {did_you_mean(kind, SOURCES)}")
    return SOURCES[kind]


def open_source(kind: str, path: Path, labels: Path | None = None) -> ImageSource:
    """The images of a folder or file.

    Raises:
        UserError: unknown kind, one without images of its own, or one that takes no labels.
    """
    source = find_source(kind)
    if not issubclass(source, ImageSource):
        raise UserError(f"kind {kind} has no images of its own")
    if labels is not None and "labels" not in source.takes:
        raise UserError(f"kind {kind} takes no `labels`")
    return source(path, labels)
