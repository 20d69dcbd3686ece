"""Images named in a table."""

import csv
from pathlib import PurePosixPath

from maect.core.errors import UserError
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, Listing


class ImageList(ImageSource):
    """Labels number the classes in the order of their names."""

    kind = "list"
    about = "a .csv or .tsv table with the columns path (below its folder) and, if known, label"

    def list_images(self) -> Listing:
        """Images in the order of the lines."""
        columns, lines = self._table()
        if "path" not in columns:
            raise UserError(f"{self.path}: the first line names no column `path`")
        for number, line in lines:
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
            Entry(line["path"], labels[line["label"]] if names else UNLABELLED, line["path"])
            for _, line in lines
        ]
        return Listing(entries, names, [])

    def _table(self) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
        """Names of the columns, and each line with its number."""
        delimiter = "\t" if self.path.suffix == ".tsv" else ","
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, delimiter=delimiter, strict=True)
                lines = [(reader.line_num, line) for line in reader]
                return [*(reader.fieldnames or [])], lines
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: not a table in UTF-8 ({error})") from None
