"""What the first page of a report says of its table, the trainings and the images."""

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maect import __version__
from maect.core.files import write_record
from maect.experiment import load
from maect.experiment.pages import pages, report_config
from maect.records import RunRecord
from maect.report.claims import claims_table
from maect.report.configs import ReportConfig, Row, ShownConfig
from maect.report.headline import main_result_of
from maect.report.pages import SAMPLES, about, make_report, report_page, samples
from maect.report.statements import STATEMENTS
from maect.report.tables import build_table, write_table

MODELS = {
    "mae": {"knn": 87.0, "low_shot_5": 66.5, "accuracy": 44.4},
    "ct_min": {"knn": 90.4, "low_shot_5": 80.9, "accuracy": 72.2},
    "ct_aug": {"knn": 92.4, "low_shot_5": 83.0, "accuracy": 73.4},
}
"""Percent, of a demo."""


@pytest.fixture
def page(tmp_path: Path, result) -> Callable[..., ReportConfig]:
    """The files behind a first page: of each model, as many seeds as it has numbers."""

    def write(
        models: Mapping[str, Mapping[str, float | Sequence[float]]],
        drawn: Sequence[str] = ("mae", "ct_min"),
        images: int = 500,
    ) -> ReportConfig:
        rows = []
        for method, values in models.items():
            of_seeds = {name: np.atleast_1d(value) for name, value in values.items()}
            count = max(map(len, of_seeds.values()))
            names = [f"{method}_tiny" + (f"-s{seed}" if seed else "") for seed in range(count)]
            for seed, run in enumerate(names):
                for name, each in of_seeds.items():
                    kind = {"knn": "knn", "accuracy": "clustering"}.get(name, "low_shot")
                    result(run, kind, **{name: float(each[seed])})
            rows.append(Row("tiny", method, tuple(names)))
        given = {"evaluations": tmp_path / "evaluations", "runs": tmp_path / "runs"}
        tables = tuple(tmp_path / f"tables/{name}.csv" for name in ("low_shot", "clustering"))
        figure, index = tmp_path / "figures/umap.png", tmp_path / "index.json"
        for file in (*tables, figure):
            file.parent.mkdir(exist_ok=True)
            shown = [row for row in rows if row.method in drawn or file != figure]
            ShownConfig(name=file.stem, rows=shown, **given).write(file.with_suffix(".yaml"))
        for file in tables:
            write_table(build_table(file.stem, rows, given["evaluations"]), file)
        Image.new("RGB", (68, 34)).save(figure)
        write_record(index, {"n": images})
        shown = {"tables": tables, "stated": tables, "figures": (figure,)}
        return ReportConfig(name="mine", tested=index, **shown)

    return write


ONLY, NEAR = {"ct_min": {"knn": 80.0}}, [92.4, 91.8, 92.0]


@pytest.mark.parametrize(
    ("models", "more", "said"),
    [
        # Of 500 images each, sqrt(44.4 * 55.6 / 500 + 72.2 * 27.8 / 500) = 3.0.
        (MODELS, {}, "Cluster accuracy rises from 44.4 % (MAE) to 72.2 % (MAE-CT min): "
         "+27.8 ± 3.0 points (one seed, 500 test images)."),
        # The figure shows both tuned models: the one with the larger difference.
        (MODELS, {"drawn": ("mae", "ct_min", "ct_aug")}, "Cluster accuracy rises from 44.4 % (MAE)"
         " to 73.4 % (MAE-CT aug): +29.0 ± 3.0 points (one seed, 500 test images)."),
        # None of the figure's models was tuned: any model of the tables.
        (MODELS, {"drawn": ("mae",)}, "Cluster accuracy rises from 44.4 % (MAE)"
         " to 73.4 % (MAE-CT aug): +29.0 ± 3.0 points (one seed, 500 test images)."),
        # +6 that each of three seeds has is more than +10 that hangs on the seed, or one image.
        ({"mae": {"knn": [80.0, 81.0, 82.0], "accuracy": [40.0, 41.0, 39.0], "low_shot_5": NEAR},
          "ct_min": {"knn": [86.1, 86.9, 88.0], "accuracy": [52.0, 40.0, 58.0],
                     "low_shot_5": [one + 0.2 for one in NEAR]}}, {},
         "k-NN accuracy rises from 81.0 % (MAE) to 87.0 % (MAE-CT min): +6.0 ± 0.1 points "
         "(mean ± standard deviation of 3 seeds, 500 test images)."),
        # A loss is no gain.
        ({"mae": {"knn": 87.0}, "ct_min": {"knn": 86.0}}, {},
         "k-NN accuracy falls from 87.0 % (MAE) to 86.0 % (MAE-CT min): -1.0 ± 2.2 points "
         "(one seed, 500 test images); this may be chance."),
        # Compared with none.
        (ONLY, {"drawn": ("ct_min",), "images": 400}, "MAE-CT min: k-NN accuracy 80.0 ± 2.0 %."),
        # Numbers with labels as input are no finding.
        ({"mae": {"knn": 50.0}, "oracle": {"knn": 99.0}} | ONLY,
         {"drawn": ("mae", "oracle", "ct_min")},
         "k-NN accuracy rises from 50.0 % (MAE) to 80.0 % (MAE-CT min): +30.0 ± 2.9 points "
         "(one seed, 500 test images)."),
    ],
)  # fmt: skip
def test_the_headline_is_the_largest_finding_of_the_model_that_the_figure_shows(
    page, models, more, said
):
    """With its error, in which a difference counts."""
    assert main_result_of(page(models, **more)).text == said


def test_an_experiment_names_the_tables_and_the_images_of_its_headline(tmp_path):
    """Those of `make demo`, whose first figure shows MAE and MAE-CT min."""
    asked = {"tables": "low_shot,clustering", "figures": "umap,training_curves"}
    chosen = load("digits", protocols="knn,low_shot,clustering,umap", **asked)
    config = report_config(chosen)
    assert [file.stem for file in config.stated] == ["low_shot", "clustering"]
    assert config.tested is not None and config.tested.name == "index.json"
    assert {*config.tables, *config.figures, config.tested} <= {*config.reads}
    assert len(config.reads) == len({*config.reads})
    # Also where results lie in the working folder: relative to a page's file they are elsewhere.
    assert all(path.is_absolute() for _, page in pages(chosen) for path in page.reads)
    # The order of inputs is the order of a command's words: the same at every start.
    assert config.reads == report_config(chosen).reads
    text, mine = chosen.file.read_text(encoding="utf-8"), tmp_path / "mine.yaml"
    mine.write_text(text.replace("val: {}", "val: {kind: view, of: train, classes: dogs15}"))
    config = report_config(load(str(mine)))
    assert config.shards is None and config.tested and config.tested.parent.name == "val"


def test_the_first_line_says_version_day_revision_and_cost(tmp_path):
    """What a run starts from counts once; two devices for half an hour are half an hour."""
    rows = [Row("tiny", "mae", ("mae",)), Row("tiny", "ct_min", ("ct_min",))]

    def leave(run: str, **more: Any) -> None:
        record = {"run": run, "stage": "tune", "device_hours": 1.0, "world_size": 2}
        record |= {"finished": f"2026-11-2{len(run)}T03:00:00Z"}
        write_record(RunRecord.path(tmp_path / run), record | more)

    leave("mae")
    leave("ct_min", source="mae")
    version = f"maect {__version__} · mine"
    said = f"{version} · 26 November 2026"
    assert about("mine", rows, tmp_path) == f"{said} · 2 trainings in 60 minutes"
    leave("mae", stage="import", device_hours=None)
    assert about("mine", rows, tmp_path) == f"{said} · 1 training in 30 minutes"
    leave("ct_min", source="mae", source_revision="0123456789abcdef-dirty-42")
    assert " · revision 01234567, changed · 1 training" in about("mine", rows, tmp_path)
    assert about("mine", [], tmp_path) == version


def test_some_images_of_a_split(tmp_path):
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


def test_the_table_of_the_first_page_has_errors_and_bold(page):
    """Each ± is sqrt(p (100 - p) / 500); 0.2 points of k-NN more are chance, 5 points are not."""
    models = MODELS | {"ct_min": MODELS["ct_min"] | {"knn": 92.2}}
    models = {name: numbers | {"low_shot_5": 100.0} for name, numbers in models.items()}
    shown = main_result_of(page(models, drawn=("ct_aug",)))
    assert shown.columns == ("Cluster accuracy", "k-NN", "5 shot")
    lines = {title: dict(zip(shown.columns, cells, strict=True)) for title, cells in shown.lines}
    assert lines["MAE"]["k-NN"] == ("87.0 ± 1.5", False)
    assert lines["MAE-CT min"]["k-NN"] == ("92.2 ± 1.2", True)
    assert lines["MAE-CT aug"]["k-NN"] == ("92.4 ± 1.2", True)
    assert lines["MAE"]["Cluster accuracy"] == ("44.4 ± 2.2", False)
    assert {cells["5 shot"] for cells in lines.values()} == {("100.0 ± 0.2", True)}
    assert shown.legend == (
        "Accuracy in % ± standard error of 500 test images. Bold: the best of a column, and all "
        "that are not distinguishable from it (p > 0.05)."
    )
    text = report_page(page(models, drawn=("ct_aug",)))
    assert "<b>92.4 ± 1.2</b>" in text and "<td>87.0 ± 1.5</td>" in text
    assert text.index("rises from") < text.index("<table>") < text.index("Accuracy in %")


def test_the_report_begins_with_the_finding_and_folds_what_was_not_measured(page, tmp_path):
    claims = tmp_path / "claims.csv"
    write_table(claims_table({}), claims)
    config = page({"mae": {"accuracy": 43.21}}, drawn=("mae",))
    config.model_copy(update={"claims": claims}).write(tmp_path / "report.yaml")
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
    # Which have nothing to read.
    assert "maect duplicates" not in text and "maect predict" not in text


def test_several_seeds_have_their_own_deviation(page):
    models = {"mae": {"knn": [80.0, 81.0, 82.0]}, "ct_min": {"knn": [86.1, 86.9, 88.0]}}
    shown = main_result_of(page(models))
    mae, tuned = ("MAE", (("81.0 ± 1.0", False),)), ("MAE-CT min", (("87.0 ± 1.0", True),))
    assert shown.lines == (mae, tuned)
    said = "Accuracy in % ± standard deviation over seeds (with one seed, standard error of 500"
    assert shown.legend.startswith(said)
    assert main_result_of(ReportConfig(name="mine")).text == ""
