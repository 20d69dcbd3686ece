"""The captions, rendered as Snakemake renders them."""

from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from docutils.core import publish_parts
from jinja2 import Environment, StrictUndefined

from maect.experiment.pages import PAGES
from maect.report.claims import FAILS, HOLDS, NOISE, OPEN, UNEQUAL, claims_table
from maect.report.configs import SummaryConfig
from maect.report.figures.data import class_titles
from maect.report.registry import FIGURES, TABLES
from maect.report.statements import STATEMENTS
from maect.report.summary import make_summary, summary_page
from maect.report.tables import printed_tables, write_table
from maect.report.titles import architecture_title

CAPTIONS = Path(__file__).parents[3] / "workflow" / "report"


def rendered(name: str, **names: object) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = (CAPTIONS / name).read_text(encoding="utf-8")
    text = environment.from_string(text).render(**names)
    return publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]


def caption(kind: str, name: str, compare: bool = True) -> str:
    experiment = SimpleNamespace(spec=SimpleNamespace(compare_with_paper=compare))
    params = SimpleNamespace(caption=PAGES[kind].caption(experiment, name))
    return rendered("page.rst", snakemake=SimpleNamespace(params=params))


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_a_caption(table):
    text = caption("table", table)
    assert f"Paper: {TABLES[table].paper}".lower() in text.replace("&nbsp;", " ").lower()


def test_nothing_is_said_of_the_paper_beside_other_images():
    for name in ("low_shot", "clustering", "neighbor_retrieval", "clustering_mean"):
        text = caption("table", name, compare=False) + str(TABLES[name].label(False))
        assert "paper" not in text.lower() and "Table" not in text
        assert "several. Empty: not run." in " ".join(text.split())
    for name, shown in FIGURES.items():
        text = caption("figure", name, compare=False) + str(shown.label(False))
        assert "Paper:" not in text and "(not in" not in text and "Figure" not in text


@pytest.mark.parametrize("kinds", [(), ("figures",), ("tables", "figures")])
def test_the_first_page_names_what_the_report_has(kinds):
    files = [SimpleNamespace(path=Path("results/birds", kind, "x.html")) for kind in kinds]
    own = rendered("workflow.rst", files=files)
    assert all(
        (f"<em>{kind.title()}</em>" in own) == (kind in kinds) for kind in ("tables", "figures")
    )
    assert "paper" not in own and ("Every number of a table" in own) == ("tables" in kinds)
    claims = SimpleNamespace(path=Path("results/digits/claims.html"))
    assert "beside it" in rendered("workflow.rst", files=[*files, claims])


def test_figures_claims_and_the_workflow_have_one():
    for figure in FIGURES:
        assert "<p>" in caption("figure", figure)
    assert "Contrastive Tuning" in rendered("workflow.rst", files=[])
    text = caption("claims", "claims")
    assert all(f"<em>{word}</em>" in text for word in (HOLDS, FAILS, NOISE, OPEN, UNEQUAL))


def test_the_report_opens_on_table_picture_and_verdict(tmp_path):
    given = {name: tmp_path / f"{name}.{end}" for name, end in
             (("clustering", "csv"), ("umap", "png"), ("claims", "csv"))}  # fmt: skip
    frame = pd.DataFrame([{"architecture": "tiny", "method": "mae", "accuracy": 43.21}])
    write_table(frame.reindex(columns=printed_tables()["clustering"].columns), given["clustering"])
    given["umap"].write_bytes(b"a picture" * 2000)
    write_table(claims_table({}), given["claims"])
    config = SummaryConfig(
        name="mine", table=given["clustering"], figure=given["umap"], claims=given["claims"]
    )
    config.write(tmp_path / "summary.yaml")
    make_summary(tmp_path / "summary.yaml")
    text = rendered("workflow.rst", files=[SimpleNamespace(path=tmp_path / "summary.html")])
    order = ["mine", "43.2", "image/png;base64,YSBwaWN0dXJl", "Claims", "About this report"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    # What was not measured is folded away, once more than its numbers are.
    assert f"<details><summary>{len(STATEMENTS)} were not measured" in text
    assert text.count("<details>") == len(STATEMENTS) + 1
    assert "<style>" not in text and "system-message" not in text


def test_whoever_has_other_images_reads_what_to_do_and_no_claims(tmp_path):
    config = SummaryConfig(name="birds", run=tmp_path / "runs/ct_min", images=tmp_path / "my birds")
    text = unescape(summary_page(config))
    assert f"maect embed {tmp_path}/runs/ct_min '{tmp_path}/my birds' --out birds.parquet" in text
    assert "Claims" not in text and "paper" not in text.lower()
    assert (
        "maect duplicates" not in text and "maect predict" not in text
    )  # which have nothing to read


def test_sizes_are_printed_as_a_reader_knows_them():
    said = [architecture_title(name) for name in ("tiny_32", "huge_448", "large7_bn", "mine_32")]
    assert said == ["ViT-Tiny/4 (32 px)", "ViT-H/16 (448 px)", "ViT-L/7-BN", "mine_32"]


def test_classes_are_printed_as_a_reader_knows_them():
    assert class_titles(["n02085936", "n02110958"]) == ["Maltese dog", "pug"]
    assert class_titles(["0", "fire_truck"]) == ["0", "fire truck"]
