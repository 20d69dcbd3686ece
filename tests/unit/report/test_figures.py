"""The figures, from real digits and small written results."""

from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image
from safetensors.numpy import load_file, save_file
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

from maect.core.entries import entries, line_of
from maect.core.errors import UserError
from maect.core.files import read_record, write_record
from maect.recipes import load_encoder
from maect.records import RunRecord
from maect.report import registry
from maect.report.configs import Row, ShownConfig
from maect.report.figures import draw, method_style, styled
from maect.report.figures.data import result_files
from maect.report.figures.embedding import RADII, free_spots, read_points, umap
from maect.report.figures.grids import WRONG, cluster_retrieval
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
from maect.report.figures.schematic import columns_of, fills, rows_of
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


@cache
def clusters(samples: int) -> dict[str, dict[str, np.ndarray]]:
    """Files of real k-means clusters of the digits, as the evaluations leave them."""
    data = load_digits()
    features, labels = data.data[:samples], data.target[:samples]
    model = KMeans(10, n_init=1, random_state=0).fit(features)
    counts = np.zeros((10, 10), np.int64)
    np.add.at(counts, (labels, model.labels_), 1)
    columns = linear_sum_assignment(-counts)[1]
    images = np.repeat((data.images[:samples] * 15).astype(np.uint8)[..., None], 3, axis=-1)
    near = model.transform(features).argsort(axis=0)[:6].T
    queries = np.array([3, 10])
    distance = np.linalg.norm(features[queries, None] - features[None], axis=-1)
    neighbors = distance.argsort(axis=1)[:, 1:5]
    retrieved = {
        "cluster_images": images[near],
        "cluster_labels": labels[near].astype(np.int64),
        "cluster_classes": np.argsort(columns).astype(np.int64),
        "query_images": images[queries],
        "query_labels": labels[queries].astype(np.int64),
        "neighbor_images": images[neighbors],
        "neighbor_labels": labels[neighbors].astype(np.int64),
    }
    found = {"confusion": counts[:, columns].astype(np.int64), "labels": labels.astype(np.int64)}
    files = {"clustering": found, "retrieval": retrieved}
    return {
        file: {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for file, arrays in files.items()
    }


@pytest.fixture
def results(tmp_path, result, embedding) -> Path:
    """A small experiment's results: three finished runs with every evaluation a figure reads."""
    for run, source, recipe in (
        ("mae_tiny", None, "mae"),
        ("head_tiny", "mae_tiny", "head_min"),
        ("ct_tiny", "head_tiny", "ct_min"),
    ):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        settings = load_recipe(recipe, "tiny")
        record = {"run": run, "stage": settings.name, "source": source, "device_hours": 0.5}
        record["settings"] = settings.model_dump(mode="json")
        record["encoder"] = load_encoder("tiny").model_dump(mode="json")
        write_record(RunRecord.path(folder), record)
        more = {"lookup_accuracy": 40.0} if recipe == "ct_min" else {}
        lines = [{"epoch": n / 4, "loss": 2.0 - n / 100} | more for n in range(1, 40)]
        (folder / "metrics.jsonl").write_text(log_of(lines))
        (folder / "online").mkdir()
        for step in (10, 20, 30, 39):
            for name in ("neighbors", "reconstructions")[: 1 + (recipe == "mae")]:
                high = 36 if name == "neighbors" else 18
                sheet = np.linspace(0, 255, 48 * high).reshape(high, 48).astype(np.uint8)
                Image.fromarray(sheet).convert("RGB").save(folder / f"online/{name}-{step:08d}.jpg")
    for number, run in enumerate(("mae_tiny", "ct_tiny")):
        embedding(run)
        for file, arrays in clusters(300 + 200 * number).items():
            save_file(arrays, tmp_path / "evaluations" / run / f"{file}.safetensors")
        result(run, "clustering", accuracy=50.0 + 10 * number, silhouette=1.0)
        result(run, "knn", knn=80.0 + number, knn_standardized=79.0 + 3 * number)
        result(run, "linear_probe", linear_probe=90.0 + number)
        result(run, "low_shot", low_shot_1=40.0 + 9 * number, low_shot_2=60.0, low_shot_5=70.0)
        result(run, "color_histogram", errors=[90.0, 80.0, 70.0 - number], error_last=70.0)
        result(run, "knn_per_block", knn_standardized=[60.0, 70.0, 50.0 + 30 * number])
    return tmp_path / "evaluations"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_the_same_twice(name, results, classes, tmp_path):
    for folder in ("1", "2"):
        files = tmp_path / folder
        draw(shown(name, results, classes=classes), files / "f.pdf", files / "f.png")
    for file in ("f.pdf", "f.png"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == ["f.pdf", "f.png"]
    pdf = (tmp_path / "1/f.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    with Image.open(tmp_path / "1/f.png") as image:
        assert image.width == 1360 and 100 < image.height < 2600
        assert image.info.keys() <= {"dpi"}  # no date, no version
        extremes = image.convert("L").getextrema()
    assert extremes[0] < 60 and extremes[1] == 255


def legend_of(figure) -> list[str]:
    """Texts of all legends of a figure."""
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


@pytest.mark.parametrize("function", [gpu_hours, label_efficiency])
def test_the_papers_numbers_are_left_out_of_other_images(function, results, train_split):
    rows = [Row("base", row.method, row.runs) for row in ROWS]
    for compare in (True, False):
        given = {"compare_with_paper": compare, "classes": train_split}
        figure = function(shown(function.__name__, results, rows, **given))
        assert ("paper" in legend_of(figure)) == compare


@pytest.fixture
def train_split(tmp_path) -> Path:
    """Index of the digits that are trained on."""
    path = tmp_path / "train.json"
    write_record(path, {"n": 1297, "class_names": [str(n) for n in range(10)]})
    return path


def lines_of(figure) -> dict[str, list[list[tuple[float, float]]]]:
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
    rows = [Row("tiny", "ct_min", ["ct_min_tiny"])]
    given = {"compare_with_paper": False, "classes": train_split}
    figure = label_efficiency(shown("label_efficiency", evaluations, rows, **given))
    assert lines_of(figure) == {
        "-": [[(10, 60.0), (20, 70.0), (50, 81.0)]],
        "--": [[(13, 36.0), (130, 77.0), (1297, 95.0)]],
    }
    assert legend_of(figure) == ["MAE-CT min", "logistic regression", "fine-tuning"]
    assert figure.axes[0].get_xscale() == "log"


def test_label_efficiency_takes_the_numbers_that_a_result_records(result, evaluations):
    """Labels a class and fractions of one protocol are one line, in the order of their numbers."""
    path = result("ct_min_tiny", "low_shot", low_shot_1=60.0, low_shot_5=81.0)
    sizes = {"low_shot_1-1": 8, "low_shot_1-2": 10, "low_shot_5-1": 50}
    record = read_record(path)
    record["provenance"]["subsets"] = {name: {"images": n} for name, n in sizes.items()}
    write_record(path, record)
    path = result("ct_min_tiny", "low_shot_pct", low_shot_1pct=58.0, low_shot_10pct=85.0)
    record = read_record(path)
    record["provenance"]["subsets"] = {"low_shot_1pct": {"images": 12}}
    write_record(path, record)
    rows = [Row("tiny", "ct_min", ["ct_min_tiny"])]
    figure = label_efficiency(
        shown("label_efficiency", evaluations, rows, compare_with_paper=False)
    )
    # Nothing says how many labels 10 % are.
    assert lines_of(figure) == {"-": [[(9, 60.0), (12, 58.0), (50, 81.0)]]}


def luminance(color: object) -> float:
    """Relative luminance of a colour (WCAG 2)."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))


def contrast(one: object, other: object) -> float:
    """Contrast of two colours (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", [name for name in FIGURES if name != "confusion"])
def test_text_of_figures_can_be_read_on_either_page(name, dark, results, classes, train_split):
    """4.5 is what WCAG asks for; in a coloured box it is the box that counts."""
    split = train_split if name == "label_efficiency" else classes
    function = resolve_name(f"maect.report.figures.{FIGURES[name].draw}")
    with styled(dark):
        figure = function(shown(name, results, classes=split))
        page = figure.get_facecolor()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    assert texts and (luminance(page) < 0.01) == dark
    runs = {"mae_tiny", "head_tiny", "ct_tiny"} if name == "pipeline" else ()
    for text in texts:
        grounds = fills().values() if text.get_text() in runs else [page]
        assert min(contrast(text.get_color(), ground) for ground in grounds) >= 4.5, text


@pytest.mark.parametrize("name", ["reconstructions", "neighbors_in_training"])
def test_runs_without_online_evaluation_are_no_error(name, evaluations, out):
    """A pipeline whose runs are of an earlier version still ends with a report."""
    draw(shown(name, evaluations), *out)
    with Image.open(out[1]) as image:
        assert image.size == (1360, 200) and image.convert("L").getextrema()[0] < 60


@pytest.mark.parametrize(
    "name", [name for name in FIGURES if name not in ("reconstructions", "neighbors_in_training")]
)
def test_nothing_to_draw_is_said(name, evaluations, out):
    rows = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", [])]
    words = "umap" if name == "cluster_formation" else name.split("_")[0]
    with pytest.raises(UserError, match=words):
        draw(shown(name, evaluations, rows), *out)
    assert not out[0].exists() and not out[1].exists()


def test_an_unknown_figure_is_named(evaluations, out):
    with pytest.raises(UserError, match=r"unknown figure 'umpa'; did you mean 'umap'\?"):
        draw(shown("umpa", evaluations), *out)


def test_every_figure_reads_what_some_table_or_evaluation_leaves():
    known = {name for table in registry.TABLES.values() for name in table.reads("mae")}
    reads = {name for figure in FIGURES.values() for name in figure.reads("mae")}
    assert reads <= known | {"umap", "umap_all", "retrieval", "knn_per_block"}


def test_wrong_retrievals_are_framed(results, out):
    draw(shown("cluster_retrieval", results), *out)
    assert WRONG in colors_in(out[1])  # k-means on pixels mixes some digits
    for row in ROWS:
        path = results / row.runs[0] / "retrieval.safetensors"
        arrays = load_file(path)
        same = np.broadcast_to(arrays["cluster_classes"][:, None], arrays["cluster_labels"].shape)
        save_file(arrays | {"cluster_labels": np.ascontiguousarray(same)}, path)
    draw(shown("cluster_retrieval", results), *out)
    assert WRONG not in colors_in(out[1])


def test_all_models_have_their_nearest_images(results):
    (results / "ct_aug").mkdir()
    (results / "ct_aug/retrieval.safetensors").symlink_to(results / "ct_tiny/retrieval.safetensors")
    given = shown("cluster_retrieval", results, [*ROWS, Row("tiny", "ct_aug", ["ct_aug"])])
    drawn = [axes for axes in cluster_retrieval(given).axes if axes.images]
    titles = list(result_files(given))
    assert len(titles) == 3 and [axes.get_title() for axes in drawn] == titles


def test_a_ninth_method_does_not_look_like_the_first():
    looks = {tuple(method_style(number).values())[:2] for number in range(32)}
    assert len(looks) == 32


def test_names_of_classes_stand_beside_the_points_and_not_on_each_other():
    dice = np.random.default_rng(0)
    centers = dice.uniform(0.3, 0.7, (8, 2))
    points = (centers[:, None] + dice.normal(0, 0.02, (8, 50, 2))).reshape(-1, 2)
    sizes = np.column_stack([dice.uniform(0.05, 0.15, 8), np.full(8, 0.04)])
    spots = free_spots(points, centers, sizes)
    assert (spots >= sizes / 2 - 1e-9).all() and (spots <= 1 - sizes / 2 + 1e-9).all()
    for i, j in combinations(range(8), 2):
        gap = np.abs(spots[i] - spots[j]) - (sizes[i] + sizes[j]) / 2
        assert gap.max() >= 0

    def covered(places):
        return (np.abs(points[None] - places[:, None]) < sizes[:, None] / 2).all(axis=2).sum()

    assert covered(spots) < covered(centers) / 4
    assert np.linalg.norm(spots - centers, axis=1).max() <= max(RADII) + 1e-9


def test_other_queries_are_refused(results, out):
    path = results / "ct_tiny" / "retrieval.safetensors"
    arrays = load_file(path)
    save_file(arrays | {"query_labels": arrays["query_labels"][::-1].copy()}, path)
    with pytest.raises(UserError, match="other queries"):
        draw(shown("neighbor_retrieval", results), *out)


def test_a_damaged_result_is_named(results, out):
    save_file({"labels": np.zeros(3, np.int64)}, results / "mae_tiny" / "clustering.safetensors")
    with pytest.raises(UserError, match=r"mae_tiny/clustering.safetensors: has no `confusion`"):
        draw(shown("confusion", results), *out)
    path = results / "mae_tiny" / "color_histogram.json"
    write_record(path, {"metrics": {"errors": 3}})
    with pytest.raises(UserError, match=r"mae_tiny/color_histogram.json: `errors` is no list"):
        draw(shown("color_histogram", results), *out)
    path = results / "ct_tiny" / "knn_per_block.json"
    write_record(path, {"metrics": {"knn_standardized": 3}})
    with pytest.raises(UserError, match=r"ct_tiny/knn_per_block.json: .* no list with a value"):
        draw(shown("knn_per_block", results), *out)


def test_knn_per_block_is_a_mean_over_seeds(results, result):
    result("ct_tiny-s1", "knn_per_block", knn_standardized=[62.0, 74.0, 70.0])
    rows = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", ["ct_tiny", "ct_tiny-s1"])]
    asked = shown("knn_per_block", results).model_copy(update={"rows": rows})
    (ax,) = by_block(asked).axes
    one, several = ax.containers
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
    write_record(
        results.parent / "runs/ct_tiny-s1/run.json",
        {"run": "ct_tiny-s1", "stage": "tune", "sha256": sums},
    )
    _, alone = by_block(asked).axes[0].containers
    assert alone[0].get_ydata().tolist() == [60.0, 70.0, 80.0]
    result("ct_tiny-s1", "knn_per_block", knn_standardized=[62.0, 74.0])
    with pytest.raises(UserError, match="a value for each block"):
        by_block(asked)


def test_points_need_cost_and_accuracy(results):
    table = build_table("gpu_hours", [*ROWS, Row("tiny", "ct_aug", ["none"])], results)
    points = points_of(table, cost_table(ROWS, results.parent / "runs"))
    assert [(p.method, p.hours, p.recorded, p.accuracy) for p in points.itertuples()] == [
        ("mae", 0.5, 0.5, 90.0), ("ct_min", 1.5, 1.5, 91.0),
    ]  # fmt: skip


def test_models_of_others_cost_what_the_benchmark_says(results, result, out):
    """Own models move to its hours, with those that were recorded beside them."""
    hours = {"tiny": {"mae": 2.0, "ct_min": 2.5}, "large7": {"msn": 9.0}, "large": {"ibot": 5.0}}
    result("mae_tiny", "throughput", model_hours=hours, flash_gain=31.0)
    result("ibot_large", "linear_probe", linear_probe=80.5)
    rows = [*ROWS, Row("large", "ibot", ["ibot_large"]), Row("base", "dino", ["dino_base"])]
    table = build_table("gpu_hours", rows, results)
    mae = table.set_index(["architecture", "method"]).loc[("tiny", "mae")]
    assert (mae.hours, mae.flash_gain) == (2.0, 31.0)
    found = points_of(table, cost_table(rows, results.parent / "runs")).itertuples()
    points = {(p.architecture, p.method): p for p in found}
    # DINO was not timed; MSN with ViT-L/7 has no run, only the paper's accuracy.
    assert set(points) == {
        ("tiny", "mae"), ("tiny", "ct_min"), ("large", "ibot"), ("large7", "msn"),
    }  # fmt: skip
    own, ibot, msn = (
        points[key] for key in (("tiny", "ct_min"), ("large", "ibot"), ("large7", "msn"))
    )
    assert (own.hours, own.recorded, own.drawn) == (2.5, 1.5, 91.0)
    assert (ibot.hours, ibot.accuracy, ibot.paper, ibot.drawn) == (5.0, 80.5, 81.0, 80.5)
    assert (msn.hours, msn.paper, msn.drawn) == (9.0, 80.7, 80.7) and np.isnan(msn.accuracy)
    figure = gpu_hours(shown("gpu_hours", results, rows))
    axes = figure.axes[0]
    words = [text.get_text() for text in axes.texts]
    assert sorted(words) == ["ViT-L/16", "ViT-L/7", "ViT-Tiny/4", "ViT-Tiny/4"]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[:5] == ["MAE", "MAE-CT min", "iBOT", "MSN", "paper"]
    assert names[5:] == ["hours by a short benchmark", "hours as recorded"]
    # Without the paper's numbers, nothing is left of what was only printed.
    table = build_table("gpu_hours", rows, results, paper=False)
    assert "msn" not in set(points_of(table, cost_table(rows, results.parent))["method"])


def test_a_schematic_places_sources_left_and_between_what_follows():
    nodes = [
        RunRecord(run="mae", stage="pretrain", source=None),
        RunRecord(run="head", stage="head", source="mae"),
        RunRecord(run="a", stage="tune", source="head"),
        RunRecord(run="b", stage="tune", source="head"),
        RunRecord(run="other", stage="import", source=None),
    ]
    assert columns_of(nodes) == {"mae": 0, "head": 1, "a": 2, "b": 2, "other": 0}
    rows, total = rows_of(nodes)
    assert total == 3 and rows == {"a": 0, "b": 1, "head": 0.5, "mae": 0.5, "other": 2}
    with pytest.raises(UserError, match="ct starts from unknown run 'gone'"):
        columns_of([RunRecord(run="ct", stage="tune", source="gone")])


def test_a_class_looks_the_same_in_every_panel(embedding, result, evaluations, out):
    for run in ("mae_tiny", "ct_tiny"):
        embedding(run)
        result(run, "clustering", accuracy=61.7)
    draw(shown("umap", evaluations, [*ROWS, Row("tiny", "ct_aug", ["not_run"])]), *out)
    with Image.open(out[1]) as image:
        assert image.height < image.width  # two panels, not three in two lines
    assert {"#0072B2", "#D55E00"} <= colors_in(out[1])


def test_an_embedding_has_the_accuracy_that_the_paper_prints_for_it(embedding, result, evaluations):
    settings = {"umap": {"classes": ["b", "a"]}, "clustering": {"subsets": {"dogs15": ["b", "a"]}}}
    embedding("combined")
    for name, metrics in (
        ("umap", {}),
        ("clustering", {"dogs15_accuracy": 30.04, "accuracy": 9.0}),
    ):
        path = result("combined", name, **metrics)
        write_record(path, read_record(path) | {"settings": settings[name]})
    rows = [Row("large", "combined", ["combined"])]
    for compare, paper in ((True, " (paper 32.6 %)"), (False, "")):
        figure = umap(shown("umap", evaluations, rows, compare_with_paper=compare))
        title = figure.axes[0].get_title()
        assert title == f"combined pre-training\ncluster accuracy 30.0 %{paper}"


def test_many_classes_and_missing_labels(evaluations, out):
    points = np.random.default_rng(0).standard_normal((6000, 2)).astype(np.float32)
    labels = np.arange(6000) % 1000 - 1
    (evaluations / "mae_tiny").mkdir()
    save_file({"points": points, "labels": labels}, evaluations / "mae_tiny/umap.safetensors")
    draw(shown("umap", evaluations), *out)
    assert out[0].stat().st_size < 400_000  # the points are a picture in the PDF
    assert len(colors_in(out[1])) > 500


@pytest.mark.parametrize("samples", [600, 6000])
def test_groups_of_classes_have_the_colours_of_figure_1(samples, evaluations, classes, out):
    points = np.random.default_rng(0).standard_normal((samples, 2)).astype(np.float32)
    (evaluations / "ct_tiny").mkdir()
    tensors = {"points": points, "labels": np.arange(samples) % 10}
    save_file(tensors, evaluations / "ct_tiny/umap.safetensors")
    groups = {"low": [f"digit_{n}" for n in range(4)], "high": ["digit_8", "digit_9"]}
    for name, third in (("cluster_formation", False), ("umap", True)):
        given = groups if name == "cluster_formation" else None
        draw(shown(name, evaluations, classes=classes, groups=given), *out)
        drawn = colors_in(out[1])
        # Two groups, and a third colour only where there are classes.
        assert {"#0072B2", "#D55E00"} <= drawn and ("#009E73" in drawn) is third
    groups["high"].append("digit_10")
    with pytest.raises(UserError, match="has no class 'digit_10'"):
        draw(shown("cluster_formation", evaluations, classes=classes, groups=groups), *out)


def test_wrong_embeddings_are_named(evaluations, out):
    path = evaluations / "mae_tiny/umap.safetensors"
    with pytest.raises(UserError, match="no such file"):
        read_points(path)
    path.parent.mkdir()
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a safetensors file"):
        read_points(path)
    save_file({"points": np.zeros((3, 2), np.float32)}, path)
    with pytest.raises(UserError, match="has no `labels`; run the umap evaluation again"):
        read_points(path)
    save_file({"points": np.zeros((3, 2), np.float32), "labels": np.zeros(4, np.int64)}, path)
    with pytest.raises(UserError, match="do not fit"):
        read_points(path)
    save_file(
        {"points": np.full((3, 2), np.nan, np.float32), "labels": np.zeros(3, np.int64)}, path
    )
    with pytest.raises(UserError, match="not finite"):
        draw(shown("umap", evaluations), *out)
    assert not out[0].exists() and not out[1].exists()


def test_long_curves_are_averaged_not_thinned():
    lines = [{"epoch": s, "loss": float(s % 2)} for s in range(4 * POINTS)]
    horizontal, vertical = curve([*lines, {"epoch": 5, "loss": float("nan")}], "epoch", "loss")
    assert len(horizontal) == POINTS
    assert vertical.mean() == pytest.approx(0.5) and np.all(vertical == 0.5)


def test_curves_of_one_stage_share_a_panel(results, out):
    runs = results.parent / "runs"
    (runs / "other").mkdir()
    record = {"run": "other", "stage": "pretrain", "source": None, "device_hours": 0.5}
    write_record(RunRecord.path(runs / "other"), record)
    (runs / "other/metrics.jsonl").write_text((runs / "mae_tiny/metrics.jsonl").read_text())
    draw(shown("training_curves", results, [ROWS[0], Row("tiny", "x", ["other"])]), *out)
    assert {"#0072B2", "#D55E00"} <= colors_in(out[1])


def test_compute_adds_up_and_what_was_shared_is_drawn_once(results):
    for run in ("mae_tiny", "head_tiny", "ct_tiny"):
        path = results.parent / "runs" / run / "metrics.jsonl"
        logged = [
            {key: step[key] for key in ("epoch", "loss")}
            | ({"online_knn": step["step"]} if step["step"] % 13 == 0 else {})
            for step in entries(path)
        ]
        path.write_text(log_of(logged))
    (ax,) = knn_compute(shown("knn_compute", results)).axes
    first, second = (line.get_xydata() for line in ax.lines if len(line.get_xydata()) > 1)
    assert list(first[:, 1]) == [13, 26, 39]
    assert list(second[:, 1]) == [39, *[13, 26, 39] * 2]  # from the end of the first
    costs = [load_recipe(name, "tiny") for name in ("mae", "head_min", "ct_min")]
    flops = [one.flops_per_image(load_encoder("tiny")) * one.batch_size / 1e15 for one in costs]
    ends = np.cumsum([39 * flop for flop in flops])
    assert np.allclose(
        [first[-1, 0], second[0, 0], second[3, 0], second[-1, 0]], ends[[0, 0, 1, 2]]
    )
    assert np.allclose(second[4, 0], ends[1] + 13 * flops[2])
    marks = [line.get_xydata()[0] for line in ax.lines if len(line.get_xydata()) == 1]
    assert any(np.allclose(mark, (ends[2], 81.0)) for mark in marks)


def test_gain_is_of_the_mae_that_a_run_begins_with(results, result):
    runs, told = results.parent / "runs", load_recipe("ct_min", "tiny").model_dump(mode="json")
    log = (runs / "head_tiny/metrics.jsonl").read_text()
    made = (
        ("right", {"lookup": "oracle", "oracle_right": 0.5}, 52.0, 85.0),
        ("all_right", {"lookup": "oracle"}, 100.0, 87.0),
        ("none", {"lookup": "none"}, None, 80.5),
    )
    for name, head, right, knn in made:
        (runs / name).mkdir()
        recipe = told | {"head": told["head"] | head}
        record = {"run": name, "stage": "tune", "source": "head_tiny", "settings": recipe}
        write_record(RunRecord.path(runs / name), record)
        more = {} if right is None else {"lookup_accuracy": right}
        lines = [{"epoch": n, "loss": 1.0} | more for n in (1, 2)]
        (runs / name / "metrics.jsonl").write_text(log_of(lines))
        result(name, "knn", knn=1.0, knn_standardized=knn)
    # Without a run to start from there is nothing to gain on.
    (runs / "scratch").mkdir()
    record = {"run": "scratch", "stage": "tune", "source": None, "settings": told}
    write_record(RunRecord.path(runs / "scratch"), record)
    (runs / "scratch/metrics.jsonl").write_text(log)
    result("scratch", "knn", knn=1.0, knn_standardized=50.0)
    names = ("mae_tiny", "ct_tiny", "all_right", "right", "none", "scratch")
    rows = [Row("tiny", name, [name]) for name in names]
    (ax,) = gain_by_precision(shown("gain_by_precision", results, rows)).axes
    drawn = [line.get_xydata().tolist() for line in ax.lines if line.get_linestyle() != "None"]
    assert [[52.0, 6.0], [100.0, 8.0]] in drawn  # 85 and 87, of 79
    assert [[0.0, 1.5], [1.0, 1.5]] in drawn  # without lookup: a height
    points = [line.get_xydata().tolist() for line in ax.lines if len(line.get_xydata()) == 1]
    assert [[40.0, 3.0]] in points
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(legend) == ["min, lookup", "min, no lookup", "min, oracle"]


def test_the_nnclr_loss_of_pretraining_has_a_panel_of_its_own(results):
    runs = results.parent / "runs"
    for run, loss in (("combined", 0.004), ("detached", 5.0)):
        (runs / run).mkdir()
        record = {"run": run, "stage": "pretrain", "source": None, "device_hours": 0.5}
        write_record(RunRecord.path(runs / run), record)
        parts = {"loss": 1 + loss, "loss_mae": 1.0, "loss_nnclr": 5.0}
        log = log_of([{"epoch": n, **parts} for n in range(1, 9)])
        (runs / run / "metrics.jsonl").write_text(log)
    rows = [*ROWS, Row("tiny", "combined", ["combined"]), Row("tiny", "detached", ["detached"])]
    figure = training_curves(shown("training_curves", results, rows))
    drawn = {ax.get_title(): {line.get_label(): line for line in ax.lines} for ax in figure.axes}
    assert list(drawn["Pre-training"]) == ["mae_tiny", "combined", "detached"]
    assert list(drawn["Pre-training, NNCLR"]) == ["combined", "detached"]
    assert "Contrastive tuning\nct_tiny" in drawn
    # MAE's part beside MAE: sums with another loss are not comparable.
    assert set(drawn["Pre-training"]["detached"].get_ydata()) == {1.0}
    assert set(drawn["Pre-training, NNCLR"]["combined"].get_ydata()) == {5.0}


def test_titles_of_panels_do_not_meet(results):
    runs, long = (
        results.parent / "runs",
        "head_min_of_photographs_from_the_north-s1.fine_tune.seed0",
    )
    for run, stage in (("mae_tiny", "pretrain"), (long, "head"), ("ct_min_of_photographs", "tune")):
        (runs / run).mkdir(exist_ok=True)
        record = {"run": run, "stage": stage, "source": None, "device_hours": 0.5}
        write_record(RunRecord.path(runs / run), record)
        log = [{"epoch": n, "loss": 1.0, "online_knn": 40.0} for n in (1, 2)]
        (runs / run / "metrics.jsonl").write_text(log_of(log))
    rows = [Row("tiny", run, [run]) for run in ("mae_tiny", long, "ct_min_of_photographs")]
    with styled():
        figure = training_curves(shown("training_curves", results, rows))
        figure.canvas.draw()
        boxes = [ax.title.get_window_extent() for ax in figure.axes]
    assert len(boxes) == 5 and "…" in figure.axes[1].get_title()
    for left, right in pairwise(boxes):
        assert left.x1 < right.x0 or left.y0 > right.y1
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


def test_online_evaluations_have_a_panel_of_their_own(results):
    before = len(training_curves(shown("training_curves", results)).axes)
    path = results.parent / "runs/mae_tiny/metrics.jsonl"
    with open(path, "a") as file:
        file.write(log_of([{"epoch": 1, "loss": 1.0, "online_knn": 40.0}]))
    axes = training_curves(shown("training_curves", results)).axes
    assert len(axes) == before + 1 and "accuracy" in axes[-1].get_ylabel()
    assert axes[-1].lines[0].get_xydata().tolist() == [[1, 40]]
    assert axes[-1].lines[0].get_marker() == "o"  # of one point there is no line


def test_wrong_logs_are_named(results, out):
    path = results.parent / "runs/mae_tiny/metrics.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="no step was logged"):
        draw(shown("training_curves", results), *out)
    path.write_text(log_of([{"epoch": 1}]) + '{"epo')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: damaged"):
        draw(shown("training_curves", results), *out)
    path.write_text(log_of([{"epoch": 1}]))
    with pytest.raises(UserError, match="no line has both 'epoch' and 'loss'"):
        draw(shown("training_curves", results), *out)
