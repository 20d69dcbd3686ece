"""What is shown, as a file: it moves with its folder and is rewritten only if it changed."""

import os
from pathlib import Path

import pytest

from maect.core.files import read_record
from maect.core.stamps import is_current, stamp_path
from maect.experiment.pages import make_page
from maect.records import RunRecord
from maect.report.claims import make_claims
from maect.report.configs import ClaimsConfig, ReportConfig, Row, ShownConfig
from maect.report.figures import make_figure
from maect.report.render import make_table


@pytest.fixture
def config(tmp_path: Path) -> ShownConfig:
    rows = [Row("tiny", "mae", ["mae_tiny", "mae_tiny-s1"]), Row("tiny", "ct_min", [])]
    return ShownConfig(
        name="clustering", rows=rows, evaluations=tmp_path / "evaluations", runs=tmp_path / "runs"
    )


def test_what_the_commands_leave(config, result, tmp_path):
    result("mae_tiny", "clustering", accuracy=50.0, silhouette=-2.0)
    config.write(tmp_path / "tables/clustering.yaml")
    make_table(tmp_path / "tables/clustering.yaml")
    endings = {path.suffix for path in (tmp_path / "tables").iterdir()}
    assert endings == {".yaml", ".csv", ".sha256", ".md", ".tex"}

    record = RunRecord(run="mae_tiny", stage="pretrain", device_hours=0.5)
    record.write(RunRecord.path(tmp_path / "runs/mae_tiny"))
    shown = config.model_copy(update={"name": "pipeline"})
    shown.write(tmp_path / "figures/pipeline.yaml")
    make_figure(tmp_path / "figures/pipeline.yaml")
    endings = {path.suffix for path in (tmp_path / "figures").iterdir()}
    assert endings == {".yaml", ".pdf", ".png"}
    assert (tmp_path / "figures/pipeline.dark.png").exists()

    csv = tmp_path / "tables/clustering.csv"
    told = {"tables": [csv], "rows": config.rows, "runs": config.runs}
    index = tmp_path / "shards/val/index.json"  # which may be gone
    ClaimsConfig(**told, images={"val": index}).write(tmp_path / "claims.yaml")
    make_claims(tmp_path / "claims.yaml")
    assert "silhouette" in (tmp_path / "claims.csv").read_text()


def test_pages_and_claims_record_what_they_were_made_of(config, result, tmp_path):
    """A table kept old numbers: a page is out of date once a file that it was made of changes."""
    evaluated = result("mae_tiny", "clustering", accuracy=50.0, silhouette=-2.0)
    csv = tmp_path / "tables/clustering.csv"
    told = {"tables": [csv], "rows": config.rows, "runs": config.runs, "images": {}}
    asked = {
        csv.with_suffix(".yaml"): config.model_copy(update={"reads": (evaluated,)}),
        tmp_path / "claims.yaml": ClaimsConfig(**told, reads=(csv,)),
        tmp_path / "report.yaml": ReportConfig(name="mine", tables=(csv,), reads=(csv,)),
    }
    for path, page in asked.items():
        page.write(path)
        assert not is_current(path, page)
        make_page(path)
        made_of = read_record(stamp_path(path))["made_of"]
        assert set(made_of) == {os.path.relpath(file, path.parent) for file in page.reads}
        assert all(made_of.values()) and is_current(path, page), path
    table, *others = asked.items()
    result("mae_tiny", "clustering", accuracy=60.0, silhouette=-2.0)
    assert not is_current(*table)
    assert all(is_current(*other) for other in others), "the table is as it was"
    make_page(table[0])
    assert is_current(*table) and not any(is_current(*other) for other in others)
