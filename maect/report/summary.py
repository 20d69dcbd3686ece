"""The first page of a report: the headline table and picture, the verdict, what to do next."""

import base64
import io
import itertools
import shlex
import tarfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from maect import __version__
from maect.core.entries import entries
from maect.core.errors import counted, entry
from maect.core.files import read_table_text, seek_record, write_text
from maect.records import RunRecord, lineage
from maect.report.configs import Row, ShownConfig, SummaryConfig
from maect.report.headline import main_result_of
from maect.report.images import Explored
from maect.report.registry import FIGURES, TABLES
from maect.report.render import printed, render_page, verdicts
from maect.report.tables import read_table
from maect.report.titles import method_title
from maect.stages import STAGES

GROUPS, PICTURES = 6, 8
SAMPLES, SIDE = 24, 64  # images of the data set, and pixels of their longer side


def make_summary(path: Path) -> None:
    """`maect page summary.yaml`: beside it the page."""
    write_text(path.with_suffix(".html"), summary_page(SummaryConfig.read(path)))


def summary_page(config: SummaryConfig) -> str:
    """Render the page; it needs no other file."""
    table = config.table and printed(read_table(config.table), config.table.stem)
    claims = None
    if config.claims is not None:
        claims = pd.read_csv(io.StringIO(read_table_text(config.claims)), keep_default_na=False)
    return render_page(
        "summary.html",
        name=config.name,
        description=config.description,
        **(vars(table) if table else {}),
        table=bool(table),
        finding=main_result_of(config),
        about=about(config),
        remarks=equal_rows(config.table) if config.table else [],
        made=made(config.table) if config.table else "",
        samples=samples(config.shards) if config.shards else [],
        MISSING="",
        picture=data_uri(config.figure.read_bytes(), "png") if config.figure else "",
        picture_title=entry(config.figure.stem, FIGURES, "figure").title if config.figure else "",
        groups=_groups(config.explored) if config.explored else [],
        **({"summary": ""} if claims is None else verdicts(claims)),
        config=config,
        quoted=lambda path: shlex.quote(str(path)),
    )


def equal_rows(table: Path) -> list[str]:
    """Return a sentence for each model with the very numbers of the model it was tuned from."""
    frame = read_table(table)
    remarks = []
    shown = entry(table.stem, TABLES, "table").metrics
    columns = [metric.name for metric in shown if metric.name in frame]
    runs = {(row.architecture, row.method): row.runs for row in _rows(table)}
    models = {run: model for model, own in runs.items() for run in own}
    lines = {(line["architecture"], line["method"]): line for _, line in frame.iterrows()}
    for model, line in lines.items():
        own = runs.get(model, ())
        behind = [record.run for run in own[:1] for record in _behind(table, run)][1:]
        first = next((lines[models[run]] for run in behind if models.get(run) in lines), None)
        if first is None:
            continue
        one, two = first[columns].astype(float), line[columns].astype(float)
        both = one.notna() & two.notna()
        same = both.any() and (one[both] == two[both]).all()
        if not same or (one[both] == 100).all():  # which tuning cannot raise
            continue
        found = (entries(table.parents[1] / "runs" / run / "metrics.jsonl") for run in own)
        steps = max((logged[-1]["step"] for logged in found if logged), default=0)
        what = f"{counted(steps, 'step')} of tuning have" if steps else "tuning has"
        remarks.append(
            f"{method_title(line['method'])} has the same numbers as "
            f"{method_title(first['method'])}: {what} hardly changed the encoder. "
            "Give it more epochs."
        )
    return remarks


def _rows(table: Path) -> list[Row]:
    """Return the models of a table from its resolved file; [] if there is none."""
    config = table.with_suffix(".yaml")
    return ShownConfig.read(config).rows if config.exists() else []


def _behind(table: Path, run: str) -> Iterator[RunRecord]:
    """Return the records of a run and of all it started from, as far as they exist, it first."""
    return lineage(run, lambda name: RunRecord.find(table.parents[1] / "runs" / name))


def trained(table: Path) -> list[RunRecord]:
    """Return the records of the trainings behind a table that are finished here."""
    names = [run for row in _rows(table) for run in row.runs]
    behind = (_behind(table, run) for run in reversed(names))
    records = {record.run: record for record in itertools.chain.from_iterable(behind)}
    trains = {name for name, stage in STAGES.items() if stage.trains}
    return [one for one in records.values() if one.finished and one.stage in trains]


def about(config: SummaryConfig) -> str:
    """Return the line below the title: version, and day and revision of the last training."""
    records = trained(config.table) if config.table else []
    parts = [f"maect {__version__}"]
    if records:
        last = max(records, key=lambda record: str(record.finished))
        day = date.fromisoformat(str(last.finished)[:10])
        parts.append(f"{day.day} {day:%B %Y}")
        if last.source_revision:
            dirty = ", changed" if "-dirty" in last.source_revision else ""
            parts.append(f"revision {last.source_revision[:8]}{dirty}")
    return " · ".join(parts)


def made(table: Path) -> str:
    """Return when the trainings behind a table ended, and their duration; "" if unknown."""
    records = trained(table)
    hours = sum((record.device_hours or 0) / (record.world_size or 1) for record in records)
    if not records or not hours:
        return ""
    day = max(str(record.finished) for record in records)[:10]
    took = f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"
    return f"{counted(len(records), 'training')}, {took} together; the last one ended on {day}."


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
                    picture = _thumbnail(stream.read()) if stream else None
                    found += [picture] if picture else []
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
            small = opened.convert("RGB")
            small.thumbnail((SIDE, SIDE))
            stream = io.BytesIO()
            small.save(stream, "JPEG", quality=85)
    except (OSError, ValueError):
        return None
    return data_uri(stream.getvalue(), "jpeg")


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


def data_uri(image: bytes, kind: str) -> str:
    """Return an image as the source of an `img`, in lines: docutils refuses 10,000 characters."""
    text = base64.b64encode(image).decode()
    lines = (text[start : start + 4000] for start in range(0, len(text), 4000))
    return f"data:image/{kind};base64," + "\n".join(lines)
