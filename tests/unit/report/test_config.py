"""What is shown, as a file: it moves with its folder and is rewritten only if it changed."""

import os
from pathlib import Path

import pytest

from maect.core.files import read_record
from maect.core.stamps import is_current, stamp_path
from maect.experiment.pages import make_page
from maect.records import RunRecord
from maect.report.configs import ClaimsConfig, ReportConfig, Row, ShownConfig


@pytest.fixture
def config(tmp_path: Path) -> ShownConfig:
    rows = [Row("tiny", "mae", ["mae_tiny", "mae_tiny-s1"]), Row("tiny", "ct_min", [])]
    return ShownConfig(
        name="clustering", rows=rows, evaluations=tmp_path / "evaluations", runs=tmp_path / "runs"
    )


def test_pages_leave_their_files_and_record_what_they_were_made_of(config, result, tmp_path):
    """A table kept old numbers: a page is out of date once a file that it was made of changes."""
    evaluated = result("mae_tiny", "clustering", accuracy=50.0, silhouette=-2.0)
    record = RunRecord.path(tmp_path / "runs/mae_tiny")
    RunRecord(run="mae_tiny", stage="pretrain", device_hours=0.5).write(record)
    csv, figure = tmp_path / "tables/clustering.csv", tmp_path / "figures/pipeline.png"
    told = {"tables": [csv], "rows": config.rows, "runs": config.runs}
    told["images"] = {"val": tmp_path / "shards/val/index.json"}  # which may be gone
    drawn = config.model_copy(update={"name": "pipeline", "reads": (record,)})
    asked = {
        csv.with_suffix(".yaml"): config.model_copy(update={"reads": (evaluated,)}),
        tmp_path / "claims.yaml": ClaimsConfig(**told, reads=(csv,)),
        tmp_path / "report.yaml": ReportConfig(name="mine", tables=(csv,), reads=(csv,)),
        figure.with_suffix(".yaml"): drawn,
    }
    for path, page in asked.items():
        page.write(path)
        assert not is_current(path, page)
        make_page(path)
        made_of = read_record(stamp_path(path))["made_of"]
        assert set(made_of) == {os.path.relpath(file, path.parent) for file in page.reads}
        assert all(made_of.values()) and is_current(path, page), path
    endings = {path.suffix for path in csv.parent.iterdir()}
    assert endings == {".yaml", ".csv", ".sha256", ".md", ".tex", ".done"}
    assert {path.suffix for path in figure.parent.iterdir()} == {".yaml", ".pdf", ".png", ".done"}
    assert figure.with_suffix(".dark.png").exists()
    assert "silhouette" in (tmp_path / "claims.csv").read_text()
    table, *others = [*asked.items()][:3]
    result("mae_tiny", "clustering", accuracy=60.0, silhouette=-2.0)
    assert not is_current(*table)
    assert all(is_current(*other) for other in others), "the table is as it was"
    make_page(table[0])
    assert is_current(*table) and not any(is_current(*other) for other in others)
