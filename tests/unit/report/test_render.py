# ruff: noqa: RUF001 (the minus sign is the point)
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from maect.cli import main
from maect.core.files import write_record
from maect.records import RunRecord
from maect.report.configs import ReportConfig, Row, ShownConfig
from maect.report.figures import class_titles
from maect.report.pages import report_page
from maect.report.registry import FIGURES, TABLES, architecture_title
from maect.report.render import printed, render
from maect.report.tables import build_table, paper_table, printed_tables, write_table


@pytest.fixture
def frame(result, evaluations):
    for seed, value in enumerate((70.0, 71.0, 73.0)):
        result(f"r{seed}", "clustering", accuracy=value - 15, silhouette=8.96)
    rows = [Row("large", "ct_min", ["r0", "r1", "r2"]), Row("large", "mae", [])]
    return build_table("clustering", rows, evaluations)


def test_markdown_and_latex(frame):
    lines = render(printed(frame, "clustering"), "md").splitlines()
    assert any("(paper: Table 2)" in line for line in lines)
    assert "| ViT-L/16 | MAE-CT min | 56.3 ± 1.5 (54.9, +1.4) | 9.0 ± 0.0 (11.0, −2.0) |" in lines
    assert "| ViT-L/16 | MAE | – (14.3) | – (−4.1) |" in lines
    text = render(printed(frame, "clustering"), "tex")
    assert text.startswith("\\begin{tabular}{llrr}")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", line)) == 3 for line in body)
    assert r"56.3 {\scriptsize $\pm$1.5} {\scriptsize (54.9, $+$1.4)}" in text
    assert text.isascii()


def test_plain_text_is_aligned(frame, tmp_path, capsys):
    write_table(frame, tmp_path / "tables/clustering.csv")
    assert main(["show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if ("(" in line and "±" in line) or "MAE " in line]
    assert "56.3 ± 1.5 (54.9, +1.4)" in lines[-2] and "(14.3)" in lines[-1]
    assert lines[-2].index(")") == lines[-1].index(")")


def page_of(frame, rows, evaluations) -> str:
    """The report of one table."""
    csv = evaluations.parent / "tables/clustering.csv"
    write_table(frame, csv)
    folders = {"evaluations": evaluations, "runs": evaluations.parent / "runs"}
    ShownConfig(name="clustering", rows=rows, **folders).write(csv.with_suffix(".yaml"))
    return report_page(ReportConfig(name="mine", tables=(csv,)))


def test_html_is_whole_and_stands_alone(frame, evaluations):
    text = page_of(frame, [], evaluations)
    assert re.search(r"<td>56.3 ± 1.5\s*<small>paper 54.9 \(\+1.4\)</small>\s*</td>", text)
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert not re.search(r"https?://|<script src|@import|url\(", text)
    table = text[text.index("<table>") : text.index("</table>") + len("</table>")]
    rows = list(ElementTree.fromstring(table).iter("tr"))
    width = [sum(int(one.get("colspan", 1)) for one in row) for row in rows]
    assert width == [3] * 4  # header, architecture, two models


def test_every_number_leads_to_its_result_and_its_run(result, evaluations):
    result("ct-s0", "clustering", accuracy=50.0, silhouette=1.0)
    run = RunRecord.path(evaluations.parent / "runs" / "ct-s0")
    write_record(run, {"run": "<ct-s0>", "stage": "tune"})
    # Of several seeds the first that was run.
    rows = [Row("large", "ct_min", ["ct", "ct-s0"]), Row("large", "mae", ["not_run"])]
    frame = build_table("clustering", rows, evaluations)
    page = page_of(frame, rows, evaluations)
    links = re.findall(r'<td><a href="#([^"]+)"', page)
    assert links == ["ct-s0-clustering"] * 2
    ids = re.findall(r'<pre id="([^"]+)">', page)
    assert ids == ["ct-s0-clustering", "run-ct-s0"]
    assert "&lt;ct-s0&gt;" in page


def test_a_number_leads_to_the_result_that_it_is_of(result, evaluations):
    """The first evaluation that any seed has, also where the first seed has only the second."""
    result("ct", "fine_tune_1pct_mae", low_shot_1pct=1.0)
    result("ct-s1", "fine_tune_1pct", low_shot_1pct=2.0)
    rows = [Row("large", "ct_min", ["ct", "ct-s1"])]
    table = printed(build_table("low_shot", rows, evaluations), "low_shot", rows, evaluations)
    (cell,) = (cell for line in table.lines for cell in line.cells if cell.value)
    assert (cell.value, cell.anchor) == ("2.0", "ct-s1-fine_tune_1pct")


def test_no_minus_zero_and_no_rounding_surprise(result, evaluations):
    result("r", "clustering", accuracy=54.94, silhouette=10.96)
    frame = build_table("clustering", [Row("large", "ct_min", ["r"])], evaluations)
    assert "54.9 (54.9, +0.0) | 11.0 (11.0, +0.0)" in render(printed(frame, "clustering"), "md")


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


@pytest.mark.parametrize("name", printed_tables())
def test_the_papers_whole_table_is_printed_even_if_nothing_was_run(name):
    keys = list(paper_table(name).index)
    rows = [Row(architecture, method, []) for architecture, method in keys]
    frame = build_table(name, rows, Path("nowhere"))
    table = printed(frame, name)
    for form in ("md", "tex"):
        text = render(table, form)
        assert "nan" not in text.lower() and "None" not in text
    texts, body = [cell.paper for line in table.lines for cell in line.cells], render(table, "md")
    known = frame.filter(like="_paper").notna().to_numpy().sum()
    assert sum(f"({text})" in body for text in texts if text) == known > 0
