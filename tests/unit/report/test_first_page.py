"""What the first page of a report says of its table, the trainings and the images."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from maect.core.entries import line_of
from maect.core.files import read_record, write_record
from maect.records import RunRecord
from maect.report.configs import Row, ShownConfig
from maect.report.registry import TABLES
from maect.report.render import Printed, printed, render
from maect.report.summary import SAMPLES, equal_rows, made, meaning, samples
from maect.report.tables import KEYS, write_table


def frame_of(columns: list[str], *rows: tuple[str, float]) -> pd.DataFrame:
    """A table with the same number in all of these columns."""
    known = {column: [value for _, value in rows] for column in columns}
    metrics = [metric.name for metric in TABLES["low_shot"].metrics]
    frame = pd.DataFrame({"architecture": "tiny", "method": [method for method, _ in rows]})
    for name in metrics:
        frame[name] = known.get(name, np.nan)
        frame[f"{name}_std"] = frame[f"{name}_paper"] = np.nan
    assert list(frame.columns[:2]) == KEYS
    return frame


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        (
            ["knn", "low_shot_5"], [("mae", 86.4), ("ct_min", 90.0), ("ct_aug", 92.4)],
            "With MAE-CT aug, the nearest neighbours of a test image are of its class in 92 of "
            "100 cases; before tuning, in 86.",
        ),
        (
            ["low_shot_5"], [("ct_min", 80.6)],
            "With MAE-CT min, with five labelled images per class, 81 of 100",
        ),
        ([], [("mae", 1.0)], ""),
    ],
)  # fmt: skip
def test_a_sentence_says_what_the_table_means(columns, rows, words) -> None:
    assert meaning(frame_of(columns, *rows)).startswith(words)
    assert bool(words) == bool(meaning(frame_of(columns, *rows)))


def table_of(root: Path, *rows: tuple[str, float]) -> Path:
    """A table of runs, each with 22 steps behind it, as the pipeline leaves it."""
    table = root / "tables/low_shot.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame_of(["knn", "linear_probe"], *rows), table)
    shown = [Row("tiny", method, (f"{method}_tiny",)) for method, _ in rows]
    config = {"evaluations": root / "evaluations", "runs": root / "runs"}
    ShownConfig(name="low_shot", rows=shown, **config).write(table.with_suffix(".yaml"))
    for method, _ in rows:
        folder = root / f"runs/{method}_tiny"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(line_of(22, {"loss": 1.0}, {"device_seconds": 1.0}))
        about = {"run": folder.name, "stage": "tune", "device_hours": 1.0}
        about |= {} if method == "mae" else {"source": "mae_tiny"}
        about |= {"world_size": 2, "finished": f"2026-11-2{len(method)}T03:00:00Z"}
        write_record(RunRecord.path(folder), about)
    return table


def test_equal_rows_are_said_with_the_reason(tmp_path: Path) -> None:
    table = table_of(tmp_path, ("mae", 71.9), ("ct_min", 71.9))
    assert equal_rows(table) == [
        "MAE-CT min has the same numbers as MAE: 22 steps of tuning have hardly changed the "
        "encoder. Give it more epochs."
    ]
    assert equal_rows(table_of(tmp_path, ("mae", 71.9), ("ct_min", 72.0))) == []
    # At 100 % there is nothing that tuning could raise.
    assert equal_rows(table_of(tmp_path, ("mae", 100.0), ("ct_min", 100.0))) == []
    # Neither was tuned from the other.
    assert equal_rows(table_of(tmp_path, ("moco_v3", 71.9), ("ibot", 71.9))) == []


def test_when_and_how_long(tmp_path: Path) -> None:
    table = table_of(tmp_path, ("mae", 71.9), ("ct_min", 71.9))
    # What a run starts from counts once; two devices for half an hour are half an hour.
    assert made(table) == "2 trainings, 60 minutes together; the last one ended on 2026-11-26."
    imported = RunRecord.path(tmp_path / "runs/mae_tiny")
    write_record(imported, read_record(imported) | {"stage": "import", "device_hours": None})
    assert made(table) == "1 training, 30 minutes together; the last one ended on 2026-11-26."
    table.with_suffix(".yaml").unlink()
    assert made(table) == ""


def test_some_images_of_a_split(tmp_path: Path) -> None:
    files = ["val-000000.tar", "val-000001.tar"]
    for name in files:
        with tarfile.open(tmp_path / name, "w") as tar:
            for number in range(SAMPLES // 2 + 1):
                stream = io.BytesIO()
                mode = "I;16" if number == 0 else "L"
                Image.new(mode, (200, 100), number).save(stream, "PNG")
                for ending, data in (("png", stream.getvalue()), ("cls", b"3")):
                    info = tarfile.TarInfo(f"{number}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    index = {"shards": [{"file": name} for name in files]}
    write_record(tmp_path / "index.json", index)
    found = samples(tmp_path)
    assert len(found) == SAMPLES and all(one.startswith("data:image/jpeg;base64,") for one in found)
    (tmp_path / files[0]).write_bytes(b"")  # not there any more: no picture, and no error
    assert samples(tmp_path) == []


def test_words_of_a_table_are_explained() -> None:
    table: Printed = printed(frame_of(["knn"], ("mae", 1.0)), "low_shot")
    page = render(table, "html")
    assert '<abbr title="masked autoencoder: the encoder before tuning">MAE</abbr>' in page
    assert "<dt>k-NN</dt>" in page and "<dt>1 shot</dt>" not in page
