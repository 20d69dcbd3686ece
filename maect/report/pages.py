"""Pages for any browser, each in one file that needs no other and no network.

The report has findings, with every table, figure and claim. The page of several data sets has every
encoder on each, by every evaluation. The page of images has a map, groups and look-alikes, from
files of `explore`; its drawing is a script in the template.

A result that is missing, damaged, or of other images or another encoder raises a `UserError`.
"""

import base64
import io
import itertools
import json
import logging
import math
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from maect import __version__
from maect.core.errors import UserError, counted, entry
from maect.core.files import read_record, read_table_text, read_text, seek_record, write_text
from maect.evaluate.clustering import Clusters
from maect.evaluate.protocols.stored_features import columns_of
from maect.records import EvaluationRecord, RunRecord, is_finished, lineage
from maect.report.configs import DatasetsConfig, ImagesConfig, ReportConfig, Row, ShownConfig
from maect.report.figures import read_tensors
from maect.report.headline import main_result_of
from maect.report.registry import FIGURES, TABLES
from maect.report.render import (
    INTERVALS,
    MINUS,
    Printed,
    data_uri,
    matrices,
    printed,
    render_page,
    small_jpeg,
    verdicts,
)
from maect.report.tables import read_metrics, read_table, result_file, write_table
from maect.stages import STAGES

log = logging.getLogger(__name__)

GROUPS, PICTURES = 6, 8
SAMPLES, SIDE = 24, 64  # images of the data set, and pixels of their longer side
LOSSLESS = 300_000  # bytes; above them a figure is a photograph
DARK = ".dark.png"
"""Ending of a figure for a dark page."""
COLUMNS = ("encoder", "dataset", "evaluation", "metric", "value", "low", "high")
NOTES = (
    "Rows are runs, and each seed is a run. A column is missing where nothing was evaluated.",
    INTERVALS,
    "A number without the words 'held-out' may be the best of several settings on the test images.",
)
_ARRAYS = (
    "points", "splits", "ids", "labels", "clusters", "distance", "neighbors", "similarity", "atlas",
    "grains", "grain_clusters", "grain_distance",
)  # fmt: skip
_STEPS = 10_000
"""Positions on the map along its longer side."""


def make_report(path: Path) -> None:
    """`maect page report.yaml`: beside it the page."""
    write_text(path.with_suffix(".html"), report_page(ReportConfig.read(path)))


def report_page(config: ReportConfig) -> str:
    """Render the report; it needs no other file."""
    shown = [ShownConfig.read(file.with_suffix(".yaml")) for file in config.tables]
    tables = [_printed(one, file) for one, file in zip(shown, config.tables, strict=True)]
    rows = [row for one in shown for row in one.rows]
    runs = shown[0].runs if shown else Path()
    claims = None
    if config.claims is not None:
        claims = pd.read_csv(io.StringIO(read_table_text(config.claims)), keep_default_na=False)
    return render_page(
        "report.html",
        config=config,
        about=about(config.name, rows, runs),
        finding=main_result_of(config),
        samples=samples(config.shards) if config.shards else [],
        tables=tables,
        sources=_sources(shown),
        figures=[_figure(file) for file in config.figures],
        claims=claims is not None and verdicts(claims),
        datasets=_datasets(config.datasets) if config.datasets else [],
        dataset_notes=NOTES,
        groups=_groups(config.explored) if config.explored else [],
        images=read_text(config.images) if config.images else "",
        quoted=lambda path: shlex.quote(str(path)),
    )


def _printed(shown: ShownConfig, file: Path) -> Printed:
    return printed(
        read_table(file), shown.name, shown.rows, shown.evaluations, shown.compare_with_paper
    )


def _sources(tables: Sequence[ShownConfig]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return name and text of the files behind all tables, by heading and by anchor."""
    results: dict[str, tuple[str, str]] = {}
    runs: dict[str, tuple[str, str]] = {}
    for shown in tables:
        for row in shown.rows:
            for run, name in itertools.product(row.runs, TABLES[shown.name].reads(row.method)):
                path = result_file(shown.evaluations, run, name)
                if path is None:
                    continue
                result = EvaluationRecord.read(path)
                text = result.model_dump_json(indent=1, exclude={"left_sha256", "outcomes"})
                results[f"{run}-{name}"] = f"evaluations/{run}/{path.name}", text
                if is_finished(shown.runs / run):
                    text = RunRecord.of(shown.runs / run).model_dump_json(
                        indent=1, exclude_none=True
                    )
                    runs[f"run-{run}"] = str(RunRecord.path(Path("runs", run))), text
    return {
        "Where the numbers come from": results,
        "The runs behind them: recipe, seed, versions, cost": runs,
    }


def _datasets(file: Path) -> list[dict[str, Any]]:
    config = DatasetsConfig.read(file.with_suffix(".yaml"))
    return matrices_of(config, build_datasets(config))


def _figure(file: Path) -> dict[str, str]:
    """Return a figure's name, title and caption, and its pictures for a light and a dark page."""
    drawn = entry(file.stem, FIGURES, "figure")
    compare = ShownConfig.read(file.with_suffix(".yaml")).compare_with_paper
    dark = file.with_suffix(DARK)
    return {
        "name": file.stem,
        "title": drawn.title,
        "caption": drawn.about(compare),
        "light": picture(file),
        "dark": picture(dark) if dark.exists() else "",
    }


def picture(file: Path) -> str:
    """Return a picture as the source of an `img`, as WebP: exact, unless that would be large."""
    with Image.open(file) as image:
        stream = io.BytesIO()
        image.convert("RGB").save(stream, "WEBP", lossless=True)
        if stream.tell() > LOSSLESS:
            stream = io.BytesIO()
            image.convert("RGB").save(stream, "WEBP", quality=88)
    return data_uri(stream.getvalue(), "webp")


def trained(rows: Sequence[Row], runs: Path) -> list[RunRecord]:
    """Return the records of the trainings behind rows that are finished here."""
    names = [run for row in rows for run in row.runs]
    behind = (lineage(run, lambda name: RunRecord.find(runs / name)) for run in reversed(names))
    records = {record.run: record for record in itertools.chain.from_iterable(behind)}
    trains = {name for name, stage in STAGES.items() if stage.trains}
    return [one for one in records.values() if one.finished and one.stage in trains]


def about(name: str, rows: Sequence[Row], runs: Path) -> str:
    """Return the first line: version, experiment, and the trainings with day and revision."""
    records = trained(rows, runs)
    parts = [f"maect {__version__}", name]
    if records:
        last = max(records, key=lambda record: str(record.finished))
        day = date.fromisoformat(str(last.finished)[:10])
        parts.append(f"{day.day} {day:%B %Y}")
        if last.source_revision:
            dirty = ", changed" if "-dirty" in last.source_revision else ""
            parts.append(f"revision {last.source_revision[:8]}{dirty}")
        hours = sum((record.device_hours or 0) / (record.world_size or 1) for record in records)
        took = f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"
        parts.append(f"{counted(len(records), 'training')} in {took}")
    return " · ".join(parts)


def samples(shards: Path) -> list[str]:
    """Return some images of a split as sources of `img`; [] if they cannot be shown.

    Shards hold images in random order.
    """
    found: list[str] = []
    for name in (part["file"] for part in seek_record(shards / "index.json").get("shards", [])):
        try:
            with tarfile.open(shards / name) as tar:
                for member in tar:
                    stream = tar.extractfile(member)
                    small = _thumbnail(stream.read()) if stream else None
                    found += [small] if small else []
                    if len(found) == SAMPLES:
                        return found
        except (OSError, tarfile.TarError):
            break
    return found


def _thumbnail(image: bytes) -> str | None:
    """Return a small copy of an image; None if it is none, or not of 8 bits."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            if opened.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
                return None
            return small_jpeg(opened.convert("RGB"), SIDE)
    except (OSError, ValueError):
        return None


def _groups(path: Path) -> list[dict[str, Any]]:
    """Return the largest groups of images, with a few pictures of each."""
    explored = Explored.read(path)
    sizes = np.bincount(explored.arrays["clusters"])
    return [
        {
            "number": number + 1,
            "size": size,
            "pictures": [
                data_uri(explored.picture(row), "jpeg")
                for row in explored.groups.members(number)[:PICTURES]
            ],
        }
        for number, size in enumerate(sizes[:GROUPS].tolist())
    ]


def build_datasets(config: DatasetsConfig) -> pd.DataFrame:
    """Return a line for each number that a run has on a data set, with the columns `COLUMNS`.

    `low` and `high` are the ends of its 95 % interval, empty where the evaluation has none.
    """
    lines = []
    for (evaluation, metrics), run, (dataset, behind) in itertools.product(
        config.measures.items(), config.runs, config.datasets.items()
    ):
        path = result_file(config.evaluations, run, evaluation + behind)
        found = read_metrics(path) if path else {}
        for metric in metrics:
            value = found.get(metric)
            if not isinstance(value, int | float):
                continue
            ends = found.get(f"{metric}_low"), found.get(f"{metric}_high")
            lines.append((run, dataset, evaluation, metric, value, *ends))
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("value", "low", "high"), float))


def make_datasets(path: Path) -> None:
    """`maect page datasets.yaml`: beside it `datasets` as CSV and Markdown."""
    config = DatasetsConfig.read(path)
    frame = build_datasets(config)
    write_table(frame, path.with_suffix(".csv"))
    text = render_page("matrix.md", notes=NOTES, tables=matrices_of(config, frame))
    write_text(path.with_suffix(".md"), text)


def matrices_of(config: DatasetsConfig, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table for each data set: rows encoders, columns measures."""
    titles = {
        f"{evaluation} {metric}": f"{title} ({evaluation})"
        for evaluation, metrics in config.measures.items()
        for metric, title in metrics.items()
    }
    named = frame.assign(measure=frame["evaluation"] + " " + frame["metric"])
    return matrices(named, titles, "dataset", _cell)


def _cell(line: Any) -> dict[str, Any]:
    """Return a cell: the value, with one decimal if it is in percent, and its interval."""
    digits = 3 if line.metric.startswith("ei_") else 1
    value, low, high = (
        f"{number:.{digits}f}".replace("-", MINUS) for number in (line.value, line.low, line.high)
    )
    more = "" if math.isnan(line.low) else f"{low} to {high}"
    return {"value": value, "more": more, "best": False}


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
    searched = config.duplicates
    run, pairs = pairs_of(searched, config.explored[0]) if searched else ("", [])
    return render_page(
        "images.html",
        name=config.name,
        data=data,
        atlas=base64.b64encode(first.arrays["atlas"].tobytes()).decode(),
        pairs=pairs,
        searched_by=run,
    )


def pairs_of(file: Path, explored: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return a run and the pairs of images that its encoder finds alike, the most similar first.

    No pairs if they are of other images, or of an encoder that the run no longer has. Files of an
    earlier version do not name the run ("").
    """
    nothing: tuple[str, list[dict[str, Any]]] = ("", [])
    if not file.exists():
        return nothing
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
    run = found.get("run", "")
    record = RunRecord.find(file.parent / "runs" / run)
    encoder = record.encoder_sha256 if record else None
    retrained = encoder is not None and found.get("encoder_sha256", encoder) != encoder
    if not about or not digests or changed or retrained:
        log.warning(
            "%s: not of the images and the encoder as they are now: maect duplicates again", file
        )
        return nothing
    return run, sorted(found["pairs"], key=lambda pair: -pair["similarity"])
