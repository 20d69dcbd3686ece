"""Images named in a table, wherever they lie below it."""

import csv
from pathlib import PurePosixPath

from maect.core.errors import UserError
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, Listing


class ImageList(ImageSource):
    """A .csv or .tsv file; labels are the places of the classes' names in their sorted order."""

    kind = "list"
    about = "a .csv or .tsv file with the columns `path` (below its folder) and, if known, `label`"

    def list_images(self) -> Listing:
        """Images in the order of the lines."""
        delimiter = "\t" if self.path.suffix == ".tsv" else ","
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                table = csv.DictReader(file, delimiter=delimiter, strict=True)
                columns = table.fieldnames or []
                lines = [(table.line_num, line) for line in table]
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: not a table in UTF-8 ({error})") from None
        if "path" not in columns:
            raise UserError(f"{self.path}: the first line names no column `path`")
        for number, line in lines:
            path = PurePosixPath(line["path"] or "")
            if not path.name or path.is_absolute() or ".." in path.parts:
                raise UserError(
                    f"{self.path}:{number}: {line['path']!r} is no path below its folder"
                )
            if "label" in columns and not line["label"]:
                raise UserError(f"{self.path}:{number}: no label")
        names = sorted({line["label"] for _, line in lines}) if "label" in columns else []
        labels = {name: label for label, name in enumerate(names)}
        return Listing(
            [
                Entry(line["path"], labels.get(line.get("label"), UNLABELLED), line["path"])
                for _, line in lines
            ],
            names,
            [],
        )
