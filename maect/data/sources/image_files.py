"""List images that are files: in class folders, without classes, or named in a table."""

import csv
from collections.abc import Sequence
from pathlib import PurePosixPath

from maect.core.errors import UserError
from maect.data.sources.base import (
    UNLABELLED,
    Entry,
    ImageSource,
    Listing,
    class_folders,
    list_classes,
    walk_images,
)

LOSSLESS = (".png", ".bmp", ".tif", ".tiff", ".pgm")


class Folder(ImageSource):
    """Labels number the class folders in the order of their names."""

    kind = "folder"
    about = "CLASS/IMAGE, at any depth below CLASS"

    def list_images(self) -> Listing:
        """List images class by class."""
        names = class_folders(self.path)
        return list_classes(self.path, [(name, i) for i, name in enumerate(names)], names)

    def folder_names(self) -> Sequence[str] | None:
        """Return the class folders, if the source is a folder."""
        return class_folders(self.path) if self.path.is_dir() else None


class Unlabelled(ImageSource):
    """Images without labels."""

    kind = "unlabelled"
    about = "images at any depth"

    def list_images(self) -> Listing:
        """List all images."""
        files = [*walk_images(self.path)]
        entries = [Entry(name, UNLABELLED, name) for name, is_image in files if is_image]
        return Listing(entries, [], [name for name, is_image in files if not is_image])


class Masks(Unlabelled):
    """A number for every pixel of the images of the same names in another split."""

    kind = "masks"
    about = "masks at any depth: PNG, BMP or TIFF with a class number 0 to 255 for every pixel"
    numbers = True

    def list_images(self) -> Listing:
        """List all masks; refuse formats that change numbers."""
        listing = super().list_images()
        for entry in listing.entries:
            if not entry.name.lower().endswith(LOSSLESS):
                raise UserError(
                    f"{self.path / entry.name}: not a mask: its format changes numbers; save it as "
                    "PNG"
                )
        return listing


class ImageList(ImageSource):
    """Labels number the classes in the order of their names."""

    kind = "list"
    about = "a .csv or .tsv table with the columns path (below its folder) and, if known, label"

    def list_images(self) -> Listing:
        """List images in the order of the lines."""
        columns, lines = self._table()
        if "path" not in columns:
            raise UserError(f"{self.path}: the first line names no column `path`")
        for name in columns:
            if name != "label" and name.strip().lower() == "label":
                raise UserError(f"{self.path}: has a column {name!r}; call it label")
        for number, line in lines:
            if None in line:
                fault = "more values than the header has columns; quote a value that has a comma"
                raise UserError(f"{self.path}:{number}: {fault}")
            if not line["path"]:
                raise UserError(f"{self.path}:{number}: no path")
            path = PurePosixPath(line["path"])
            if path.is_absolute() or ".." in path.parts:
                fault = f"{line['path']!r} is not below the table's folder"
                raise UserError(f"{self.path}:{number}: {fault}")
            if "label" in columns and not line["label"]:
                raise UserError(f"{self.path}:{number}: no label")
        names = sorted({line["label"] for _, line in lines}) if "label" in columns else []
        labels = {name: label for label, name in enumerate(names)}
        entries = [
            Entry(path, labels[line["label"]] if names else UNLABELLED, path)
            for _, line in lines
            for path in [str(PurePosixPath(line["path"]))]  # ./a.png is a.png
        ]
        return Listing(entries, names, [])

    def _table(self) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
        """Return the names of the columns, and each line with its number."""
        delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(
                    file, delimiter=delimiter, strict=True, skipinitialspace=True
                )
                lines = [(reader.line_num, _stripped(line)) for line in reader]
                return [*(reader.fieldnames or [])], lines
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: not a table in UTF-8 ({error})") from None


def _stripped(line: dict[str, str]) -> dict[str, str]:
    """Return a line of a table without blanks at a comma, which are no part of a name."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in line.items()}
