"""Groups of images: a table of clusters, a page to look at them, and folders by group or class."""

import csv
import os
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.answers.vectors import Vectors, write_rows
from maect.core.errors import UserError
from maect.core.files import atomic_write, write_text
from maect.data.convert import picture_of
from maect.data.decode import UnreadableError
from maect.data.sources.base import Entry, ImageSource
from maect.evaluate.clustering import Clusters
from maect.recipes import Pixels
from maect.report.render import render_page, small_jpeg

SHOWN = 12
"""Pictures of a cluster on the page."""
SIDE = 128
"""Pixels of the longer side of a picture on a page."""
COLUMNS = ("cluster", "class")
"""Columns that a table may be sorted by, of `clusters.csv` and of `maect predict`."""
NONE = "none"
"""Folder of images in no group."""


def write_clusters(vectors: Vectors, clusters: Clusters, out: Path, source: ImageSource) -> None:
    """Write `clusters.csv` (file, cluster from 1, distance) and `index.html`, which works offline.

    `source`: where the images are.

    The page also has a coarser and a finer grouping, if the number of groups was chosen.
    """
    order = [int(row) for number in range(clusters.count) for row in clusters.members(number)]
    table = (
        [vectors.files[row], clusters.cluster[row] + 1, f"{clusters.distance[row]:.6g}"]
        for row in order
    )
    write_rows(out / "clusters.csv", ["file", "cluster", "distance"], table)
    grains = [(one.count, named_groups(one)) for one in (clusters, *around(clusters))]
    wanted = {int(row) for _, groups in grains for _, rows in groups for row in rows[:SHOWN]}
    files = vectors.files
    entries = {entry.name: entry for entry in source.listing().entries}
    pictures = {
        row: thumbnail(source, entries.get(files[row]), vectors.pixels) for row in sorted(wanted)
    }
    shown = [
        {
            "count": count,
            "groups": [
                {"name": name, "size": len(rows), "members": rows[:SHOWN].tolist()}
                for name, rows in groups
            ],
        }
        for count, groups in sorted(grains, key=lambda grain: grain[0])
    ]
    about = {"clusters": clusters.count, "images": len(files), "run": vectors.about["run"]}
    page = render_page(
        "clusters.html", grains=shown, files=vectors.files, pictures=pictures, about=about
    )
    write_text(out / "index.html", page)


def thumbnail(source: ImageSource, entry: Entry | None, pixels: Pixels, side: int = SIDE) -> str:
    """Return a small picture as a data URI; "" if the file can no longer be read."""
    if entry is None:
        return ""
    try:
        picture = picture_of(source.read(entry), pixels.as_seen)
    except (UnreadableError, OSError):
        return ""
    return small_jpeg(picture, side)


def around(clusters: Clusters) -> list[Clusters]:
    """Return the numbers of groups nearest to half as many and to twice as many."""
    numbers = [*clusters.grains]
    coarser = [n for n in numbers if n < clusters.count]
    finer = [n for n in numbers if n > clusters.count]
    chosen = [
        min(side, key=lambda n: abs(n - factor * clusters.count))
        for side, factor in ((coarser, 0.5), (finer, 2))
        if side
    ]
    return [clusters.grains[number] for number in chosen]


def named_groups(clusters: Clusters) -> list[tuple[str, NDArray[np.int64]]]:
    """Name and positions of each group, the most typical image first."""
    return [(f"Group {number + 1}", clusters.members(number)) for number in range(clusters.count)]


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
        UserError: no such table, an image that is in it twice, a name that would leave the
            folder, or a group with the name of the folder for images without one.
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
    if {"", NONE} <= {group.strip() for _, group in rows}:
        raise UserError(
            f"{table}: a group is called {NONE!r}, as is the folder of images without a group; "
            "give it another name"
        )
    return [(_below(name, table), _folder(group, table)) for name, group in rows]


def _below(name: str, table: Path) -> str:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not name:
        raise UserError(f"{table}: {name!r} is not the name of a file below the images")
    return name


def _folder(group: str, table: Path) -> str:
    """Return a group's folder."""
    name = group.strip()
    if name in (".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{table}: {group!r} cannot be the name of a folder")
    return name or NONE
