"""The captions, rendered as Snakemake renders them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils.core import publish_parts
from jinja2 import Environment, StrictUndefined

from maect.report.claims import claims_table
from maect.report.figures.data import class_titles
from maect.report.registry import FIGURES, TABLES, Figure, Table
from maect.report.render import claims_page
from maect.report.statements import STATEMENTS

CAPTIONS = Path(__file__).parents[3] / "workflow" / "report"


def rendered(name: str, **names: object) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = (CAPTIONS / name).read_text(encoding="utf-8")
    text = environment.from_string(text).render(**names)
    return publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]


def caption(name: str, shown: Table | Figure) -> str:
    params = SimpleNamespace(caption=shown.caption)
    return rendered(name, snakemake=SimpleNamespace(params=params))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_table_has_a_caption(table):
    text = caption("table.rst", table)
    assert f"Paper: {table.paper}".lower() in text.replace("&nbsp;", " ").lower()


def test_figures_claims_and_the_workflow_have_one():
    for figure in FIGURES.values():
        assert "<p>" in caption("figure.rst", figure)
    assert "Contrastive Tuning" in rendered("workflow.rst", files=[])
    assert "not measured" in rendered("claims.rst")


def test_the_report_opens_on_the_verdict(tmp_path):
    claims = tmp_path / "claims.html"
    claims.write_text(claims_page(claims_table({})))
    text = rendered("workflow.rst", files=[SimpleNamespace(path=claims)])
    assert text.index("Claims") < text.index("About this report")
    assert text.count("<details>") == len(STATEMENTS)
    assert "<style>" not in text and "system-message" not in text


def test_classes_are_printed_as_a_reader_knows_them():
    assert class_titles(["n02085936", "n02110958"]) == ["Maltese dog", "pug"]
    assert class_titles(["0", "fire_truck"]) == ["0", "fire truck"]
