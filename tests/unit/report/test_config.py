"""What is shown, as a file: it moves with its folder and is rewritten only if it changed."""

import os
import shutil
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.records import RunRecord
from maect.report.claims import make_claims
from maect.report.configs import ClaimsConfig, Row, ShownConfig
from maect.report.figures import make_figure
from maect.report.render import make_table


@pytest.fixture
def config(tmp_path: Path) -> ShownConfig:
    rows = [Row("tiny", "mae", ["mae_tiny", "mae_tiny-s1"]), Row("tiny", "ct_min", [])]
    return ShownConfig(
        name="clustering", rows=rows, evaluations=tmp_path / "evaluations", runs=tmp_path / "runs"
    )


def test_the_file_gives_what_was_written_and_moves_with_its_folder(config, tmp_path):
    file = tmp_path / "tables/clustering.yaml"
    assert config.write(file)
    assert ShownConfig.read(file) == config
    assert str(tmp_path) not in file.read_text()
    shutil.copytree(tmp_path / "tables", tmp_path / "moved/tables")
    moved = ShownConfig.read(tmp_path / "moved/tables/clustering.yaml")
    assert moved.evaluations == tmp_path / "moved/evaluations" and moved.rows == config.rows


def test_the_file_of_relative_folders(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = config.model_dump() | {"evaluations": Path("evaluations"), "runs": Path("runs")}
    relative = ShownConfig.model_validate(values)
    assert relative == config
    relative.write("tables/clustering.yaml")
    assert ShownConfig.read("tables/clustering.yaml") == config


def test_only_what_changed_is_written(config, tmp_path):
    file = tmp_path / "clustering.yaml"
    assert config.write(file)
    os.utime(file, (1e9, 1e9))
    assert not config.write(file)
    assert file.stat().st_mtime == 1e9
    assert config.model_copy(update={"compare_with_paper": False}).write(file)
    assert file.stat().st_mtime > 1e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a", "rows: Field required"),
        ("[1", "not valid YAML"),
        ("", "not a mapping of keys to values"),
        (
            "{name: a, rows: [], evaluations: e, runs: r, clases: c}",
            r"unknown key 'clases'; did you mean 'classes'\?",
        ),
    ],
)
def test_faults_are_named(text, message, tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"t\.yaml: {message}"):
        ShownConfig.read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"t\.yaml: no such file"):
        ShownConfig.read(tmp_path / "t.yaml")


def test_what_the_commands_leave(config, result, tmp_path):
    result("mae_tiny", "clustering", accuracy=50.0, silhouette=-2.0)
    config.write(tmp_path / "tables/clustering.yaml")
    make_table(tmp_path / "tables/clustering.yaml")
    endings = {path.suffix for path in (tmp_path / "tables").iterdir()}
    assert endings == {".yaml", ".csv", ".sha256", ".md", ".tex", ".html"}

    record = RunRecord(run="mae_tiny", stage="pretrain", device_hours=0.5)
    record.write(RunRecord.path(tmp_path / "runs/mae_tiny"))
    shown = config.model_copy(update={"name": "pipeline"})
    shown.write(tmp_path / "figures/pipeline.yaml")
    make_figure(tmp_path / "figures/pipeline.yaml")
    endings = {path.suffix for path in (tmp_path / "figures").iterdir()}
    assert endings == {".yaml", ".pdf", ".png"}

    csv = tmp_path / "tables/clustering.csv"
    told = {"tables": [csv], "rows": config.rows, "runs": config.runs}
    index = tmp_path / "shards/val/index.json"  # which may be gone
    ClaimsConfig(**told, images={"val": index}).write(tmp_path / "claims.yaml")
    make_claims(tmp_path / "claims.yaml")
    assert "silhouette" in (tmp_path / "claims.csv").read_text()
    assert (tmp_path / "claims.html").exists()
