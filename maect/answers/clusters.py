"""A table of clusters, and a page to look at them."""

import base64
import io
from pathlib import Path

import numpy as np

from maect.answers.vectors import Vectors, write_rows
from maect.core.files import write_text
from maect.data.convert import picture_of
from maect.data.decode import UnreadableError
from maect.evaluate.clusters import Clusters
from maect.report.render import render_page

SHOWN = 12
"""Pictures of a cluster on the page."""
_THUMBNAIL = 128


def write_clusters(
    vectors: Vectors, clusters: Clusters, out: Path, images: Path | None = None
) -> None:
    """Write `clusters.csv` (file, cluster, distance) and `index.html`, a page that works offline.

    Args:
        vectors: of the images.
        clusters: of the same images.
        out: folder to write to.
        images: where the images are, if they have moved.
    """
    alone = np.flatnonzero(clusters.cluster < 0)
    order = [int(row) for number in range(clusters.count) for row in clusters.members(number)]
    rows = [[clusters.cluster[row], f"{clusters.distance[row]:.6g}"] for row in order]
    names = [vectors.files[row] for row in (*order, *alone)]
    table = zip(names, [*rows, *([["", ""]] * len(alone))], strict=True)
    write_rows(
        out / "clusters.csv", ["file", "cluster", "distance"], ([name, *row] for name, row in table)
    )
    groups = [(f"Cluster {number}", clusters.members(number)) for number in range(clusters.count)]
    if len(alone):
        groups.append(("In no cluster", alone))
    pictures = _thumbnails(
        vectors, [row for _, members in groups for row in members[:SHOWN]], images
    )
    shown = [
        {
            "name": name,
            "size": len(members),
            "pictures": [(vectors.files[row], pictures[row]) for row in members[:SHOWN]],
        }
        for name, members in groups
    ]
    chosen = clusters.scores.get(clusters.count)
    about = {
        "clusters": clusters.count,
        "images": len(vectors.files),
        "run": vectors.about["run"],
        "how": f"silhouette coefficient {chosen:.3f}" if chosen is not None else "",
    }
    write_text(out / "index.html", render_page("clusters.html", groups=shown, about=about))


def _thumbnails(vectors: Vectors, rows: list[np.int64], images: Path | None) -> dict[np.int64, str]:
    """Small pictures as data URIs; "" where the file cannot be read any more."""
    source = vectors.source(images)
    entries = {entry.name: entry for entry in source.listing().entries}
    pixels = vectors.pixels
    found = dict.fromkeys(rows, "")
    for row in rows:
        entry, stream = entries.get(vectors.files[row]), io.BytesIO()
        try:
            picture = picture_of(source.read(entry), pixels) if entry is not None else None
        except (UnreadableError, OSError):
            picture = None
        if picture is not None:
            picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
            picture.save(stream, "JPEG", quality=80)
            data = base64.b64encode(stream.getvalue()).decode()
            found[row] = f"data:image/jpeg;base64,{data}"
    return found
