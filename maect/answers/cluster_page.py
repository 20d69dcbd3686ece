"""A table of clusters, and a page to look at them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.answers.vectors import Vectors, thumbnail, write_rows
from maect.core.files import write_text
from maect.evaluate.clusters import Clusters
from maect.report.render import render_page

SHOWN = 12
"""Pictures of a cluster on the page."""


def write_clusters(
    vectors: Vectors, clusters: Clusters, out: Path, images: Path | None = None
) -> None:
    """Write `clusters.csv` (file, cluster from 1, distance) and `index.html`, which works offline.

    `images`: where they are, if they have moved.

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
    source = vectors.source(images)
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
