"""The page to look through images: a map, groups and look-alikes, from files of `explore`.

A result that is missing, damaged, or of other images or another encoder raises a `UserError`. One
file that needs no other and no network; the drawing is a script of its own in the template.
"""

import base64
import io
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maect.core.errors import UserError
from maect.core.files import read_record, seek_record, write_text
from maect.evaluate.clustering import Clusters
from maect.evaluate.protocols.stored_features import columns_of
from maect.records import EvaluationRecord
from maect.report.configs import ImagesConfig
from maect.report.figures import read_tensors
from maect.report.render import render_page
from maect.report.tables import result_file

log = logging.getLogger(__name__)

_ARRAYS = (
    "points", "splits", "ids", "labels", "clusters", "distance", "neighbors", "similarity", "atlas",
    "grains", "grain_clusters", "grain_distance",
)  # fmt: skip
_STEPS = 10_000
"""Positions on the map along its longer side."""


@dataclass(frozen=True)
class Explored:
    """Output of the protocol `explore` for a run.

    Attributes:
        about: names of images (`names`), `splits` and `classes`; `side` of a picture in pixels.
    """

    run: str
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: Path) -> "Explored":
        """Read the tensors and names that `explore` wrote."""
        from safetensors import safe_open

        if result_file(path.parents[1], path.parent.name, path.stem, path.suffix) is None:
            raise UserError(f"{path}: not there, or of an encoder that its run no longer has")
        arrays = read_tensors(path, _ARRAYS)
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get("maect", "{}"))
        return cls(path.parent.name, about, arrays)

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.arrays["ids"])

    @cached_property
    def groups(self) -> Clusters:
        """Groups of the images, and others by their number."""
        names = ("grains", "grain_clusters", "grain_distance")
        others = zip(*(self.arrays[name] for name in names), strict=True)
        grains = {int(count): Clusters(cluster, distance) for count, cluster, distance in others}
        return Clusters(self.arrays["clusters"], self.arrays["distance"], grains)

    def grains(self) -> dict[int, list[list[int]]]:
        """Return groups of images' positions by number of groups, the chosen number included."""
        counts = {**self.groups.grains, self.groups.count: self.groups}
        return {
            count: [groups.members(number).tolist() for number in range(count)]
            for count, groups in sorted(counts.items())
        }

    @cached_property
    def _pages(self) -> Image.Image:
        return Image.open(io.BytesIO(self.arrays["atlas"].tobytes())).convert("RGB")

    def picture(self, position: int) -> bytes:
        """Return one image as a JPEG."""
        side = int(self.about["side"])
        row, column = divmod(int(position), columns_of(self.count))
        box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
        stream = io.BytesIO()
        self._pages.crop(box).save(stream, "JPEG", quality=85)
        return stream.getvalue()

    def shown(self) -> dict[str, Any]:
        """Return the data that the page's script reads about the run."""
        points = self.arrays["points"].astype(np.float64)
        low, high = points.min(axis=0), points.max(axis=0)
        spots = np.round((points - low) / max(float((high - low).max()), 1e-9) * _STEPS)
        return {
            "run": self.run,
            "x": spots[:, 0].astype(int).tolist(),
            "y": spots[:, 1].astype(int).tolist(),
            "chosen": self.groups.count,
            "grains": self.grains(),
            "near": self.arrays["neighbors"].tolist(),
            "similarity": np.round(self.arrays["similarity"].astype(float), 3).tolist(),
        }


def make_images(path: Path) -> None:
    """`maect page images.yaml`: beside it the page."""
    write_text(path.with_suffix(".html"), images_page(ImagesConfig.read(path)))


def images_page(config: ImagesConfig) -> str:
    """Render the page."""
    explored = [Explored.read(path) for path in config.explored]
    first = explored[0]
    for other, path in zip(explored, config.explored, strict=True):
        same = np.array_equal(other.arrays["ids"], first.arrays["ids"])
        if other.about != first.about or not same:
            raise UserError(
                f"{path}: of other images or classes than {config.explored[0]}; evaluate both again"
            )
    data = {
        **first.about,
        "columns": columns_of(first.count),
        "split": first.arrays["splits"].tolist(),
        "label": first.arrays["labels"].tolist(),
        "runs": [one.shown() for one in explored],
    }
    return render_page(
        "images.html",
        name=config.name,
        data=data,
        atlas=base64.b64encode(first.arrays["atlas"].tobytes()).decode(),
        pairs=pairs_of(config.duplicates, config.explored[0]) if config.duplicates else [],
    )


def pairs_of(file: Path, explored: Path) -> list[dict[str, Any]]:
    """Return pairs of images that look alike, the most similar first; [] if of other images."""
    if not file.exists():
        return []
    found = read_record(file)
    result = EvaluationRecord.seek(explored.with_suffix(".json"))
    about = result.provenance.get("splits", {}) if result else {}
    shown = {name.removeprefix("features_"): {made["index_digest"]} for name, made in about.items()}
    others: dict[str, set[str]] = {}
    for path in file.parent.glob("shards/*/*/index.json"):  # several data sets may have the split
        others.setdefault(path.parent.name, set()).add(seek_record(path).get("digest", ""))
    now = others | shown
    digests = found["splits"]
    changed = any(of not in now.get(split, {of}) for split, of in digests.items())
    if not about or not digests or changed:
        log.warning("%s: not of the images as they are now: maect duplicates again", file)
        return []
    return sorted(found["pairs"], key=lambda pair: -pair["similarity"])
