"""What the report says of its tables, figures and statements."""

from html import unescape

import pandas as pd
from PIL import Image

from maect.report.claims import claims_table
from maect.report.configs import ReportConfig, ShownConfig
from maect.report.figures import class_titles
from maect.report.pages import make_report, report_page
from maect.report.registry import FIGURES, TABLES, architecture_title
from maect.report.statements import STATEMENTS
from maect.report.tables import printed_tables, write_table


def test_the_paper_is_named_where_it_is_compared_with_alone():
    for table in TABLES.values():
        assert f"Paper: {table.paper}".lower() in table.about(True).lower()
    for shown in (*TABLES.values(), *FIGURES.values()):
        assert shown.caption and "Paper:" not in shown.about(False)


def test_sizes_and_classes_are_printed_as_a_reader_knows_them():
    said = [architecture_title(name) for name in ("tiny_32", "huge_448", "large7_bn", "mine_32")]
    assert said == ["ViT-Tiny/4 (32 px)", "ViT-H/16 (448 px)", "ViT-L/7-BN", "mine_32"]
    assert class_titles(["n02085936", "n02110958"]) == ["Maltese dog", "pug"]
    assert class_titles(["0", "fire_truck"]) == ["0", "fire truck"]


def test_the_report_begins_with_the_finding_and_folds_what_was_not_measured(tmp_path):
    csv, png = tmp_path / "tables/clustering.csv", tmp_path / "figures/umap.png"
    frame = pd.DataFrame([{"architecture": "tiny", "method": "mae", "accuracy": 43.21}])
    csv.parent.mkdir()
    png.parent.mkdir()
    write_table(frame.reindex(columns=printed_tables()["clustering"].columns), csv)
    Image.new("RGB", (68, 34)).save(png)
    for file in (csv, png):
        folders = {"evaluations": tmp_path / "evaluations", "runs": tmp_path / "runs"}
        ShownConfig(name=file.stem, rows=[], **folders).write(file.with_suffix(".yaml"))
    write_table(claims_table({}), tmp_path / "claims.csv")
    config = ReportConfig(
        name="mine", tables=(csv,), stated=(csv,), figures=(png,), claims=tmp_path / "claims.csv"
    )
    config.write(tmp_path / "report.yaml")
    make_report(tmp_path / "report.yaml")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    order = ["<h1>MAE: cluster accuracy 43.2", "image/webp", 'id="claims"', 'id="tables"']
    order += ['id="figures"', 'id="sources"']
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    folded = text[text.index('id="claims"') : text.index('id="tables"')]
    assert f"<summary>{len(STATEMENTS)} were not measured" in folded
    assert folded.count("<details") == len(STATEMENTS) + 1
    assert text.count("<style>") == 1 and "http://" not in text


def test_whoever_has_other_images_reads_what_to_do_and_no_claims(tmp_path):
    run, images = tmp_path / "runs/ct_min", tmp_path / "my birds"
    text = unescape(report_page(ReportConfig(name="birds", run=run, folder=images)))
    assert f"maect embed {tmp_path}/runs/ct_min '{tmp_path}/my birds' --out birds.parquet" in text
    assert "Claims" not in text and "paper" not in text.lower()
    assert (
        "maect duplicates" not in text and "maect predict" not in text
    )  # which have nothing to read
