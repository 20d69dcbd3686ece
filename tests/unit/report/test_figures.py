"""The figures, from real digits and small written results."""

import shutil
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix

from maect.core.errors import UserError
from maect.core.files import read_record, write_record
from maect.recipes import load_encoder
from maect.records import RunRecord, line_of
from maect.report.configs import Row, ShownConfig
from maect.report.figures import COLORS, draw, grids, save, styled
from maect.report.figures.embedding import read_points, umap
from maect.report.figures.grids import columns_of, fills, rows_of
from maect.report.figures.lines import (
    POINTS,
    by_block,
    curve,
    gain_by_precision,
    gpu_hours,
    knn_compute,
    label_efficiency,
    points_of,
    training_curves,
)
from maect.report.registry import FIGURES
from maect.report.tables import build_table, cost_table
from maect.stages import load_recipe

ROWS = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", ["ct_tiny", "ct_tiny-s1"])]
Files = tuple[Path, Path]


def shown(name: str, evaluations: Path, rows: list[Row] = ROWS, **changes: object) -> ShownConfig:
    folders = {"evaluations": evaluations, "runs": evaluations.parent / "runs"}
    return ShownConfig.model_validate({"name": name, "rows": rows, **folders, **changes})


@pytest.fixture
def out(tmp_path) -> Files:
    return tmp_path / "f.pdf", tmp_path / "f.png"


@pytest.fixture
def classes(tmp_path) -> Path:
    path = tmp_path / "index.json"
    write_record(path, {"class_names": [f"digit_{n}" for n in range(10)]})
    return path


def colors_in(path: Path) -> set[str]:
    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(maxcolors=2**24)
    return {"#{:02X}{:02X}{:02X}".format(*color) for _, color in found}


def log_of(lines: list[dict[str, float]]) -> str:
    """A log with these entries."""
    return "".join(line_of(n, line, {"device_seconds": 1.0}) for n, line in enumerate(lines, 1))


def leave_run(runs: Path, run: str, stage: str, log: list[dict[str, Any]], **more: Any) -> None:
    """Leave a run's record and log."""
    record = {"run": run, "stage": stage, "device_hours": 0.5}
    write_record(RunRecord.path(runs / run), record | more)
    (runs / run / "metrics.jsonl").write_text(log_of(log))


@cache
def clusters(samples: int) -> dict[str, dict[str, np.ndarray]]:
    """Files of clusters of the digits, every seventh in a wrong one, as evaluations leave them."""
    data = load_digits()
    images = np.repeat((data.images[:samples] * 15).astype(np.uint8)[..., None], 3, axis=-1)
    labels = data.target[:samples].astype(np.int64)
    found = np.where(np.arange(samples) % 7, labels, (labels + 1) % 10)
    near = np.stack([np.flatnonzero(found == number)[:6] for number in range(10)])
    parts = {"cluster": near, "query": np.array([3, 10]), "neighbor": np.arange(20, 28)}
    parts["neighbor"] = parts["neighbor"].reshape(2, 4)
    retrieved = {f"{part}_images": images[rows] for part, rows in parts.items()}
    retrieved |= {f"{part}_labels": labels[rows] for part, rows in parts.items()}
    retrieved["cluster_classes"] = np.arange(10)
    counts = confusion_matrix(labels, found).astype(np.int64)
    return {"clustering": {"confusion": counts, "labels": labels}, "retrieval": retrieved}


def write_points(evaluations: Path, run: str, labels: np.ndarray) -> None:
    """Write an embedding of noise."""
    points = np.random.default_rng(0).standard_normal((len(labels), 2)).astype(np.float32)
    (evaluations / run).mkdir(parents=True)
    save_file({"points": points, "labels": labels}, evaluations / run / "umap.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_result) -> Path:
    """A small experiment's results: three finished runs with every evaluation a figure reads."""
    tmp_path = tmp_path_factory.mktemp("finished")
    result = partial(write_result, tmp_path / "evaluations")
    for run, source, recipe in (
        ("mae_tiny", None, "mae"),
        ("head_tiny", "mae_tiny", "head_min"),
        ("ct_tiny", "head_tiny", "ct_min"),
    ):
        folder, settings = tmp_path / "runs" / run, load_recipe(recipe, "tiny")
        more = {"lookup_accuracy": 40.0} if recipe == "ct_min" else {}
        log = [{"epoch": n / 4, "loss": 2.0 - n / 100} | more for n in range(1, 40)]
        for step in (13, 26, 39):
            log[step - 1]["online_knn"] = float(step)
        about = {"source": source, "settings": settings.model_dump(mode="json")}
        about["encoder"] = load_encoder("tiny").model_dump(mode="json")
        leave_run(folder.parent, run, settings.name, log, **about)
        (folder / "online").mkdir()
        for step in (10, 20, 30, 39):
            for name in ("neighbors", "reconstructions")[: 1 + (recipe == "mae")]:
                high = 32 if name == "neighbors" else 18
                sheet = np.linspace(0, 255, 48 * high).reshape(high, 48).astype(np.uint8)
                Image.fromarray(sheet).convert("RGB").save(folder / f"online/{name}-{step:08d}.jpg")
    for number, run in enumerate(("mae_tiny", "ct_tiny")):
        write_points(tmp_path / "evaluations", run, np.arange(600) % 10)
        for file, arrays in clusters(300 + 200 * number).items():
            save_file(arrays, tmp_path / "evaluations" / run / f"{file}.safetensors")
        result(run, "clustering", accuracy=50.0 + 10 * number, silhouette=1.0)
        result(run, "knn", knn=80.0 + number, knn_standardized=79.0 + 3 * number)
        result(run, "linear_probe", linear_probe=90.0 + number)
        result(run, "low_shot", low_shot_1=40.0 + 9 * number, low_shot_2=60.0, low_shot_5=70.0)
        result(run, "color_histogram", errors=[90.0, 80.0, 70.0 - number], error_last=70.0)
        result(run, "knn_per_block", knn_standardized=[60.0, 70.0, 50.0 + 30 * number])
    return tmp_path


@pytest.fixture
def results(finished, tmp_path) -> Path:
    """The same, to change."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "evaluations"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_the_same_twice_and_can_be_read(
    name, finished, classes, train_split, tmp_path
):
    """Its text on either page, by the contrast of 4.5 that WCAG asks for."""
    split = train_split if name == "label_efficiency" else classes
    asked = shown(name, finished / "evaluations", classes=split)
    function = resolve_name(f"maect.report.figures.{FIGURES[name].draw}")
    with styled(dark=True):
        check_contrast(name, function(asked), dark=True)
    with styled():
        figure = function(asked)
        check_contrast(name, figure, dark=False)
        save(figure, tmp_path / "1/f.pdf", tmp_path / "1/f.png")
    draw(asked, tmp_path / "2/f.pdf", tmp_path / "2/f.png")
    for file in ("f.pdf", "f.png"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "2").iterdir()) == ["f.pdf", "f.png"]
    pdf = (tmp_path / "1/f.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    with Image.open(tmp_path / "1/f.png") as image:
        assert image.width == 1360 and 100 < image.height < 2600
        assert image.info.keys() <= {"dpi"}  # no date, no version
        extremes = image.convert("L").getextrema()
    assert extremes[0] < 60 and extremes[1] == 255


def contrast(one: object, other: object) -> float:
    """Contrast of two colours (WCAG 2), by their relative luminance."""
    lights = []
    for color in (one, other):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        lights.append(float(np.dot(parts, (0.2126, 0.7152, 0.0722))) + 0.05)
    return max(lights) / min(lights)


def check_contrast(name: str, figure: Figure, dark: bool) -> None:
    """Every text of a figure can be read; in a coloured box it is the box that counts."""
    page = figure.get_facecolor()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    assert texts and (contrast(page, "black") < 1.2) == dark
    if name == "confusion":
        return  # numbers on a scale of colours
    runs = {"mae_tiny", "head_tiny", "ct_tiny"} if name == "pipeline" else ()
    for text in texts:
        grounds = fills().values() if text.get_text() in runs else [page]
        assert min(contrast(text.get_color(), ground) for ground in grounds) >= 4.5, text


def legend_of(figure) -> list[str]:
    """Texts of all legends of a figure."""
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


@pytest.fixture
def train_split(tmp_path) -> Path:
    """Index of the digits that are trained on."""
    path = tmp_path / "train.json"
    write_record(path, {"n": 1297, "class_names": [str(n) for n in range(10)]})
    return path


def efficiency_of(evaluations: Path, classes: Path | None = None) -> Figure:
    """The figure of a model's accuracy by labels."""
    rows = [Row("tiny", "ct_min", ["ct_min_tiny"])]
    more = {"compare_with_paper": False, "classes": classes}
    return label_efficiency(shown("label_efficiency", evaluations, rows, **more))


def lines_of(figure: Figure) -> dict[str, list[list[tuple[float, float]]]]:
    """Points that lines of the first panel join, by the style of the line."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for container in figure.axes[0].containers:
        line = container.lines[0]
        points = [tuple(map(float, point)) for point in line.get_xydata()]
        found.setdefault(line.get_linestyle(), []).append(points)
    return found


def test_label_efficiency_has_a_line_for_each_protocol_over_the_number_of_labels(
    result, evaluations, train_split
):
    """On 1,297 digits 1 % are 13 labels, one a class: fine-tuned, it is no point of that line."""
    result("ct_min_tiny", "low_shot", low_shot_1=60.0, low_shot_2=70.0, low_shot_5=81.0)
    result("ct_min_tiny", "fine_tune_1pct", low_shot_1pct=36.0)
    result("ct_min_tiny", "fine_tune_10pct", low_shot_10pct=77.0)
    result("ct_min_tiny", "fine_tune", fine_tune=95.0)
    figure = efficiency_of(evaluations, train_split)
    assert lines_of(figure) == {
        "-": [[(10, 60.0), (20, 70.0), (50, 81.0)]],
        "--": [[(13, 36.0), (130, 77.0), (1297, 95.0)]],
    }
    assert legend_of(figure) == ["MAE-CT min", "logistic regression", "fine-tuning"]
    assert figure.axes[0].get_xscale() == "log"


@pytest.mark.parametrize("name", ["gpu_hours", "label_efficiency", "umap"])
def test_the_papers_numbers_are_left_out_of_other_images(name, results, train_split):
    rows = [Row("large", row.method, row.runs) for row in ROWS]
    for compare in (True, False):
        given = {"compare_with_paper": compare, "classes": train_split}
        function = resolve_name(f"maect.report.figures.{FIGURES[name].draw}")
        texts = function(shown(name, results, rows, **given)).findobj(Text)
        assert any("paper" in text.get_text() for text in texts) == compare


def test_label_efficiency_takes_the_numbers_that_a_result_records(result, evaluations):
    """Labels a class and fractions of one protocol are one line, in the order of their numbers."""
    for name, metrics, sizes in (
        ("low_shot", {"low_shot_1": 60.0, "low_shot_5": 81.0},
         {"low_shot_1-1": 8, "low_shot_1-2": 10, "low_shot_5-1": 50}),
        # Nothing says how many labels 10 % are.
        ("low_shot_pct", {"low_shot_1pct": 58.0, "low_shot_10pct": 85.0}, {"low_shot_1pct": 12}),
    ):  # fmt: skip
        path = result("ct_min_tiny", name, **metrics)
        record = read_record(path)
        record["provenance"]["subsets"] = {name: {"images": n} for name, n in sizes.items()}
        write_record(path, record)
    assert lines_of(efficiency_of(evaluations)) == {"-": [[(9, 60.0), (12, 58.0), (50, 81.0)]]}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_to_draw_is_said(name, evaluations, out):
    """Runs without online evaluation are no error: their pipeline still ends with a report."""
    rows = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", [])]
    if name in ("reconstructions", "neighbors_in_training"):
        draw(shown(name, evaluations), *out)
        with Image.open(out[1]) as image:
            assert image.size == (1360, 200) and image.convert("L").getextrema()[0] < 60
        return
    words = "umap" if name == "cluster_formation" else name.split("_")[0]
    with pytest.raises(UserError, match=words):
        draw(shown(name, evaluations, rows), *out)
    assert not out[0].exists() and not out[1].exists()


def test_each_picture_of_another_class_is_framed_and_no_other(results):
    lines = iter(grids.neighbor_retrieval(shown("neighbor_retrieval", results)).axes)
    drawn = grids.cluster_retrieval(shown("cluster_retrieval", results))
    runs = [load_file(results / row.runs[0] / "retrieval.safetensors") for row in ROWS]
    for query in range(2):
        for arrays in runs:
            near = arrays["neighbor_labels"][query]
            framed = [bool(next(lines).patches) for _ in range(1 + len(near))]
            assert framed == [False, *(near != arrays["query_labels"][query])]
    for ax, arrays in zip(drawn.axes, runs, strict=True):
        wrong = arrays["cluster_labels"] != arrays["cluster_classes"][:, None]
        # A picture has 8 pixels and a gap of one.
        places = {(one.get_y() + 0.5, one.get_x() + 0.5) for one in ax.patches}
        assert places == {(9 * row, 9 * rank) for row, rank in np.argwhere(wrong).tolist()}


def test_a_confusion_is_in_percent_of_each_class(results):
    drawn = grids.confusion(shown("confusion", results))
    for ax, row in zip(drawn.axes, ROWS, strict=False):
        counts = load_file(results / row.runs[0] / "clustering.safetensors")["confusion"]
        percent = 100 * counts / counts.sum(1, keepdims=True)
        np.testing.assert_allclose(ax.images[0].get_array(), percent)


def test_points_have_the_colours_of_their_classes(evaluations):
    points = np.random.default_rng(0).standard_normal((40, 2)).astype(np.float32)
    labels = np.arange(40) // 20
    (evaluations / "ct_tiny").mkdir()
    save_file({"points": points, "labels": labels}, evaluations / "ct_tiny/umap.safetensors")
    (drawn,) = umap(shown("umap", evaluations)).axes[0].collections
    colors = [to_hex(color).upper() for color in drawn.get_facecolors()]
    found = dict(zip(map(tuple, drawn.get_offsets().astype(np.float32)), colors, strict=True))
    assert [found[tuple(point)] for point in points] == [COLORS[label] for label in labels]


def test_damaged_results_are_named(results, out):
    def refused(name: str, words: str) -> None:
        with pytest.raises(UserError, match=words):
            draw(shown(name, results), *out)
        assert not out[0].exists() and not out[1].exists()

    points = results / "mae_tiny/umap.safetensors"
    points.write_bytes(b"not safetensors")
    refused("umap", "not a safetensors file")
    save_file({"points": np.zeros((3, 2), np.float32)}, points)
    refused("umap", "has no `labels`; run the umap evaluation again")
    points.rename(results / "mae_tiny/clustering.safetensors")
    with pytest.raises(UserError, match="no such file"):
        read_points(points)
    refused("confusion", r"mae_tiny/clustering.safetensors: has no `labels`")
    for run, name, key, words in (
        ("mae_tiny", "color_histogram", "errors", "`errors` is no list"),
        ("ct_tiny", "knn_per_block", "knn_standardized", ".* no list with a value"),
    ):
        write_record(results / run / f"{name}.json", {"metrics": {key: 3}})
        refused(name, rf"{run}/{name}\.json: {words}")
    path = results / "ct_tiny/retrieval.safetensors"
    arrays = load_file(path)
    save_file(arrays | {"query_labels": arrays["query_labels"][::-1].copy()}, path)
    refused("neighbor_retrieval", "other queries")
    path = results.parent / "runs/mae_tiny/metrics.jsonl"
    path.write_text(log_of([{"epoch": 1}]))
    refused("training_curves", rf"{path}: no line has both 'epoch' and 'loss'")
    path.write_text("")
    refused("knn_compute", rf"{path}: no step was logged")
    record = RunRecord.path(path.parent)
    write_record(record, read_record(record) | {"log_sha256": "0" * 64})
    for name in ("training_curves", "knn_compute"):
        refused(name, rf"{path}: damaged \(its checksum is not that in run\.json")


def test_knn_per_block_is_a_mean_over_seeds(results, result):
    result("ct_tiny-s1", "knn_per_block", knn_standardized=[62.0, 74.0, 70.0])
    asked = shown("knn_per_block", results)
    one, several = by_block(asked).axes[0].containers
    assert one[0].get_ydata().tolist() == [60.0, 70.0, 50.0]
    assert several[0].get_xdata().tolist() == [1, 2, 3]
    assert several[0].get_ydata().tolist() == [61.0, 72.0, 75.0]
    # The deviation of 60 and 62 is the root of 2, to either side.
    (low, high) = several[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((61 - 2**0.5, 61 + 2**0.5))
    # One of an encoder that the run no longer has is left out, as in the tables.
    record = {"metrics": {"knn_standardized": [9.0] * 3}, "provenance": {"encoder_sha256": "old"}}
    write_record(results / "ct_tiny-s1" / "knn_per_block.json", record)
    sums = {"encoder.safetensors": "new"}
    leave_run(results.parent / "runs", "ct_tiny-s1", "tune", [], sha256=sums)
    _, alone = by_block(asked).axes[0].containers
    assert alone[0].get_ydata().tolist() == [60.0, 70.0, 80.0]
    result("ct_tiny-s1", "knn_per_block", knn_standardized=[62.0, 74.0])
    with pytest.raises(UserError, match="a value for each block"):
        by_block(asked)


def test_models_of_others_cost_what_the_benchmark_says(results, result, out):
    """Own models move to its hours, with those that were recorded beside them."""
    runs = results.parent / "runs"

    def points(rows: list[Row], **given: bool):
        found = points_of(build_table("gpu_hours", rows, results, **given), cost_table(rows, runs))
        return {(point.architecture, point.method): point for point in found.itertuples()}

    # Without a benchmark, what has cost and accuracy, at the hours that were recorded.
    before = points([*ROWS, Row("tiny", "ct_aug", ["none"])])
    known = [(p.method, p.hours, p.recorded, p.accuracy) for p in before.values()]
    assert known == [("mae", 0.5, 0.5, 90.0), ("ct_min", 1.5, 1.5, 91.0)]
    hours = {"tiny": {"mae": 2.0, "ct_min": 2.5}, "large7": {"msn": 9.0}, "large": {"ibot": 5.0}}
    result("mae_tiny", "throughput", model_hours=hours, flash_gain=31.0)
    result("ibot_large", "linear_probe", linear_probe=80.5)
    rows = [*ROWS, Row("large", "ibot", ["ibot_large"]), Row("base", "dino", ["dino_base"])]
    table = build_table("gpu_hours", rows, results)
    mae = table.set_index(["architecture", "method"]).loc[("tiny", "mae")]
    assert (mae.hours, mae.flash_gain) == (2.0, 31.0)
    # DINO was not timed; MSN with ViT-L/7 has no run, only the paper's accuracy.
    found = points(rows)
    names = ("tiny", "mae"), ("tiny", "ct_min"), ("large", "ibot"), ("large7", "msn")
    assert {*found} == {*names}
    own, ibot, msn = (found[name] for name in names[1:])
    assert (own.hours, own.recorded, own.drawn) == (2.5, 1.5, 91.0)
    assert (ibot.hours, ibot.accuracy, ibot.paper, ibot.drawn) == (5.0, 80.5, 81.0, 80.5)
    assert (msn.hours, msn.paper, msn.drawn) == (9.0, 80.7, 80.7) and np.isnan(msn.accuracy)
    figure = gpu_hours(shown("gpu_hours", results, rows))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(words) == ["ViT-L/16", "ViT-L/7", "ViT-Tiny/4", "ViT-Tiny/4"]
    names = ["MAE", "MAE-CT min", "iBOT", "MSN", "paper"]
    assert legend_of(figure) == [*names, "hours by a short benchmark", "hours as recorded"]
    # Without the paper's numbers, nothing is left of what was only printed.
    assert ("large7", "msn") not in points(rows, paper=False)


def test_a_schematic_places_sources_left_and_between_what_follows():
    about = (("mae", None), ("head", "mae"), ("a", "head"), ("b", "head"), ("other", None))
    nodes = [RunRecord(run=run, stage="tune", source=source) for run, source in about]
    assert columns_of(nodes) == {"mae": 0, "head": 1, "a": 2, "b": 2, "other": 0}
    rows, total = rows_of(nodes)
    assert total == 3 and rows == {"a": 0, "b": 1, "head": 0.5, "mae": 0.5, "other": 2}


def test_many_classes_and_missing_labels(evaluations, out):
    write_points(evaluations, "mae_tiny", np.arange(6000) % 1000 - 1)
    draw(shown("umap", evaluations), *out)
    assert out[0].stat().st_size < 400_000  # the points are a picture in the PDF
    assert len(colors_in(out[1])) > 500


def test_groups_of_classes_have_the_colours_of_figure_1(evaluations, classes, out):
    write_points(evaluations, "ct_tiny", np.arange(600) % 10)
    groups = {"low": [f"digit_{n}" for n in range(4)], "high": ["digit_8", "digit_9"]}
    for name, given, third in (("cluster_formation", groups, False), ("umap", None, True)):
        draw(shown(name, evaluations, classes=classes, groups=given), *out)
        drawn = colors_in(out[1])
        # Two groups, and a third colour only where there are classes.
        assert {"#0072B2", "#D55E00"} <= drawn and ("#009E73" in drawn) is third
    groups["high"].append("digit_10")
    with pytest.raises(UserError, match="has no class 'digit_10'"):
        draw(shown("cluster_formation", evaluations, classes=classes, groups=groups), *out)


def test_long_curves_are_averaged_not_thinned():
    lines = [{"epoch": s, "loss": float(s % 2)} for s in range(4 * POINTS)]
    horizontal, vertical = curve([*lines, {"epoch": 5, "loss": float("nan")}], "epoch", "loss")
    assert len(horizontal) == POINTS
    assert vertical.mean() == pytest.approx(0.5) and np.all(vertical == 0.5)


def test_compute_adds_up_and_what_was_shared_is_drawn_once(results):
    (ax,) = knn_compute(shown("knn_compute", results)).axes
    first, second = (line.get_xydata() for line in ax.lines if len(line.get_xydata()) > 1)
    assert list(first[:, 1]) == [13, 26, 39]
    assert list(second[:, 1]) == [39, *[13, 26, 39] * 2]  # from the end of the first
    costs = [load_recipe(name, "tiny") for name in ("mae", "head_min", "ct_min")]
    flops = [one.flops_per_image(load_encoder("tiny")) * one.batch_size / 1e15 for one in costs]
    ends = np.cumsum([39 * flop for flop in flops])
    drawn = [first[-1, 0], second[0, 0], second[3, 0], second[-1, 0]]
    assert np.allclose(drawn, ends[[0, 0, 1, 2]])
    assert np.allclose(second[4, 0], ends[1] + 13 * flops[2])
    marks = [line.get_xydata()[0] for line in ax.lines if len(line.get_xydata()) == 1]
    assert any(np.allclose(mark, (ends[2], 81.0)) for mark in marks)


def test_gain_is_of_the_mae_that_a_run_begins_with(results, result):
    runs, told = results.parent / "runs", load_recipe("ct_min", "tiny").model_dump(mode="json")
    step = {"epoch": 1, "loss": 1.0}
    for name, head, right, knn in (
        ("right", {"lookup": "oracle", "oracle_right": 0.5}, {"lookup_accuracy": 52.0}, 85.0),
        ("all_right", {"lookup": "oracle"}, {"lookup_accuracy": 100.0}, 87.0),
        ("none", {"lookup": "none"}, {}, 80.5),
    ):
        recipe = told | {"head": told["head"] | head}
        leave_run(runs, name, "tune", [step | right] * 2, source="head_tiny", settings=recipe)
        result(name, "knn", knn=1.0, knn_standardized=knn)
    # Without a run to start from there is nothing to gain on.
    leave_run(runs, "scratch", "tune", [step], settings=told)
    result("scratch", "knn", knn=1.0, knn_standardized=50.0)
    names = ("mae_tiny", "ct_tiny", "all_right", "right", "none", "scratch")
    rows = [Row("tiny", name, [name]) for name in names]
    (ax,) = gain_by_precision(shown("gain_by_precision", results, rows)).axes
    drawn = [line.get_xydata().tolist() for line in ax.lines if line.get_linestyle() != "None"]
    assert [[52.0, 6.0], [100.0, 8.0]] in drawn  # 85 and 87, of 79
    assert [[0.0, 1.5], [1.0, 1.5]] in drawn  # without lookup: a height
    assert [[40.0, 3.0]] in [line.get_xydata().tolist() for line in ax.lines]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(legend) == ["min, lookup", "min, no lookup", "min, oracle"]


def test_the_nnclr_loss_of_pretraining_has_a_panel_of_its_own(results):
    for run, loss in (("combined", 0.004), ("detached", 5.0)):
        parts = {"loss": 1 + loss, "loss_mae": 1.0, "loss_nnclr": 5.0}
        log = [{"epoch": n, **parts} for n in range(1, 9)]
        leave_run(results.parent / "runs", run, "pretrain", log)
    rows = [*ROWS, Row("tiny", "combined", ["combined"]), Row("tiny", "detached", ["detached"])]
    figure = training_curves(shown("training_curves", results, rows))
    drawn = {ax.get_title(): {line.get_label(): line for line in ax.lines} for ax in figure.axes}
    assert list(drawn["Pre-training"]) == ["mae_tiny", "combined", "detached"]
    assert list(drawn["Pre-training, NNCLR"]) == ["combined", "detached"]
    assert "Contrastive tuning\nct_tiny" in drawn
    # MAE's part beside MAE: sums with another loss are not comparable.
    assert set(drawn["Pre-training"]["detached"].get_ydata()) == {1.0}
    assert set(drawn["Pre-training, NNCLR"]["combined"].get_ydata()) == {5.0}
