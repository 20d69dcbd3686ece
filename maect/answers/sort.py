"""Images in folders by group or class, copied or linked; the images themselves stay."""

import csv
import os
from collections import Counter
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import atomic_write

COLUMNS = ("cluster", "class")
"""Columns that a table may be sorted by, of `clusters.csv` and of `maect predict`."""
NONE = "none"
"""Folder of images in no group."""


def sort_images(table: Path, images: Path, out: Path, link: bool = False) -> dict[str, int]:
    """Put a copy of each image, or a link, into a folder of its group or class; return their sizes.

    Args:
        table: a .csv with the columns `file` and `cluster` or `class`.

    Raises:
        UserError: another table, an image that is not there, or a folder that is not empty.
    """
    rows = read_table(table)
    if not images.is_dir():
        raise UserError(f"{images}: not a folder of images")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; choose another folder")
    if out.resolve().is_relative_to(images.resolve()):
        raise UserError(f"{out}: lies within the images, and would be taken for some of them")
    for name, _ in rows:  # before anything is written
        if not (images / name).is_file():
            raise UserError(f"{images / name}: no such file, but {table} has it")
    counts: dict[str, int] = {}
    for name, group in rows:
        target = out / group / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            target.symlink_to(os.path.abspath(images / name))
        else:
            with atomic_write(target) as temporary:
                temporary.write_bytes((images / name).read_bytes())
        counts[group] = counts.get(group, 0) + 1
    return dict(sorted(counts.items()))


def read_table(table: Path) -> list[tuple[str, str]]:
    """Name and folder of each image.

    Raises:
        UserError: no such table, an image that is in it twice, or a name that would leave the
            folder.
    """
    if not table.is_file():
        raise UserError(f"{table}: no such table; maect cluster and maect predict write one")
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            given = reader.fieldnames or []
            lines = [*reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{table}: not a table in UTF-8 ({error}); save it as CSV UTF-8") from None
    column = next((name for name in COLUMNS if name in given), None)
    if "file" not in given or column is None:
        raise UserError(
            f"{table}: needs a column file and a column {' or '.join(COLUMNS)}, commas between them"
        )
    rows = [(line["file"] or "", line[column] or "") for line in lines]
    for name, times in Counter(name for name, _ in rows).items():
        if times > 1:
            raise UserError(f"{table}: has {name!r} {times} times; leave one of the lines")
    return [(_below(name, table), _folder(group, table)) for name, group in rows]


def _below(name: str, table: Path) -> str:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not name:
        raise UserError(f"{table}: {name!r} is not the name of a file below the images")
    return name


def _folder(group: str, table: Path) -> str:
    """Return a group's folder."""
    if group in (".", "..") or "/" in group or "\0" in group:
        raise UserError(f"{table}: {group!r} cannot be the name of a folder")
    return group.strip() or NONE
