"""The figures beside UMAP and training curves, from real digits and small written results."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

from maect.cli import main
from maect.core.errors import UserError
from maect.report import registry
from maect.report.cost import cost_table
from maect.report.figures import COMPARED, FIGURES, draw
from maect.report.grids import WRONG
from maect.report.schematic import Node, columns_of, rows_of
from maect.report.series import points_of
from maect.report.tables import Row, build_table

ROWS = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", ["ct_tiny", "ct_tiny-s1"])]
NAMES = [f"digit {n}" for n in range(10)]


def colors_in(path: Path) -> set[str]:
    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(maxcolors=2**24)
    return {"#{:02X}{:02X}{:02X}".format(*color) for _, color in found}


def write_clusters(folder: Path, samples: int) -> None:
    """Real k-means clusters of the digits, as the evaluations leave them."""
    data = load_digits()
    features, labels = data.data[:samples], data.target[:samples]
    model = KMeans(10, n_init=1, random_state=0).fit(features)
    counts = np.zeros((10, 10), np.int64)
    np.add.at(counts, (labels, model.labels_), 1)
    columns = linear_sum_assignment(-counts)[1]
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"confusion": np.ascontiguousarray(counts[:, columns]), "labels": labels}
    save_file({k: v.astype(np.int64) for k, v in arrays.items()}, folder / "clustering.safetensors")
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
    retrieved = {name: np.ascontiguousarray(array) for name, array in retrieved.items()}
    save_file(retrieved, folder / "retrieval.safetensors")


@pytest.fixture
def results(tmp_path, result, embedding) -> Path:
    """A small experiment's results: three finished runs with every evaluation a figure reads."""
    for run, source, stage in (
        ("mae_tiny", None, "pretrain"),
        ("head_tiny", "mae_tiny", "head"),
        ("ct_tiny", "head_tiny", "tune"),
    ):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        record = {"run": run, "stage": stage, "source": source, "device_hours": 0.5}
        (folder / "run.json").write_text(json.dumps(record))
        lines = [{"step": n, "epoch": n / 4, "loss": 2.0 - n / 100} for n in range(1, 40)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, run in enumerate(("mae_tiny", "ct_tiny")):
        embedding(run)
        write_clusters(tmp_path / "evaluations" / run, samples=300 + 200 * number)
        result(run, "clustering", accuracy=50.0 + 10 * number, silhouette=1.0)
        result(run, "linear_probe", linear_probe=90.0 + number)
        result(run, "low_shot", low_shot_1=40.0 + 9 * number, low_shot_2=60.0, low_shot_5=70.0)
        result(run, "color_histogram", errors=[90.0, 80.0, 70.0 - number], error_last=70.0)
    return tmp_path / "evaluations"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_the_same_twice(name, results, tmp_path):
    for folder in ("1", "2"):
        out = tmp_path / folder
        draw(name, ROWS, results, out / "f.pdf", out / "f.png", NAMES)
    for file in ("f.pdf", "f.png"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
    with Image.open(tmp_path / "1" / "f.png") as image:
        assert image.width == 1360 and 150 < image.height < 2200
        extremes = image.convert("L").getextrema()
    assert extremes[0] < 60 and extremes[1] == 255


@pytest.mark.parametrize("name", COMPARED)
def test_the_papers_numbers_are_left_out_of_other_images(name, results, tmp_path):
    rows = [f"--row=base:{row.method}:{','.join(row.runs)}" for row in ROWS]
    gray = []  # pixels of the colour in which the legend names the paper
    for words in ([], ["--no-paper"]):
        out = [str(tmp_path / f"f.{ending}") for ending in ("pdf", "png")]
        assert main(["figure", name, *out, "--evaluations", str(results), *rows, *words]) == 0
        with Image.open(tmp_path / "f.png") as image:
            gray.append(int((np.asarray(image.convert("RGB")) == 0x77).all(axis=-1).sum()))
    assert gray[0] > gray[1]


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"pipeline"}))
def test_nothing_to_draw_is_said(name, evaluations, tmp_path):
    rows = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", [])]
    with pytest.raises(
        UserError, match="umap" if name == "cluster_formation" else name.split("_")[0]
    ):
        draw(name, rows, evaluations, tmp_path / "f.pdf", tmp_path / "f.png")
    assert not (tmp_path / "f.pdf").exists()


def test_names_are_known():
    assert FIGURES.keys() == registry.FIGURES.keys()
    known = {name for table in registry.TABLES.values() for name in table.reads("mae")}
    extra = {"umap", "umap_all", "retrieval", "color_histogram"}
    assert {name for one in registry.FIGURES.values() for name in one.reads("mae")} <= known | extra
    with pytest.raises(UserError, match="unknown figure 'umpa'; known: gpu_hours"):
        draw("umpa", [], Path(), Path(), Path())


def test_the_report_lists_in_the_papers_order():
    """Sorted as text, which is how Snakemake's report does it."""
    tables = [
        table.label["table"] for name, table in registry.TABLES.items() if name not in FIGURES
    ]
    assert tables == sorted(tables) and len(set(tables)) == len(tables)
    figures = [figure.label["figure"] for figure in registry.FIGURES.values()]
    assert figures == sorted(figures)
    assert [text.split()[1] for text in figures[:3]] == ["1:", "2:", "3:"]


def test_wrong_retrievals_are_framed(results, tmp_path):
    out = tmp_path / "f.pdf", tmp_path / "f.png"
    draw("cluster_retrieval", ROWS, results, *out)
    assert WRONG in colors_in(out[1])  # k-means on pixels mixes some digits
    for row in ROWS:
        path = results / row.runs[0] / "retrieval.safetensors"
        arrays = load_file(path)
        same = np.broadcast_to(arrays["cluster_classes"][:, None], arrays["cluster_labels"].shape)
        save_file(arrays | {"cluster_labels": np.ascontiguousarray(same)}, path)
    draw("cluster_retrieval", ROWS, results, *out)
    assert WRONG not in colors_in(out[1])


def test_other_queries_are_refused(results, tmp_path):
    path = results / "ct_tiny" / "retrieval.safetensors"
    arrays = load_file(path)
    save_file(arrays | {"query_labels": arrays["query_labels"][::-1].copy()}, path)
    with pytest.raises(UserError, match="other queries"):
        draw("neighbor_retrieval", ROWS, results, tmp_path / "f.pdf", tmp_path / "f.png")


def test_a_damaged_result_is_named(results, tmp_path):
    out = tmp_path / "f.pdf", tmp_path / "f.png"
    save_file({"labels": np.zeros(3, np.int64)}, results / "mae_tiny" / "clustering.safetensors")
    with pytest.raises(UserError, match=r"mae_tiny/clustering.safetensors: has no `confusion`"):
        draw("confusion", ROWS, results, *out)
    path = results / "mae_tiny" / "color_histogram.json"
    path.write_text('{"metrics": {"errors": 3}}')
    with pytest.raises(UserError, match="has no list `errors`"):
        draw("color_histogram", ROWS, results, *out)


def test_points_need_cost_and_accuracy(results):
    probed = build_table("low_shot", [*ROWS, Row("tiny", "ct_aug", ["none"])], results)
    points = points_of(probed, cost_table(ROWS, results.parent / "runs"))
    assert [(p.method, p.hours, p.accuracy) for p in points] == [
        ("mae", 0.5, 90.0), ("ct_min", 1.5, 91.0),
    ]  # fmt: skip


def test_a_schematic_places_sources_left_and_between_what_follows():
    nodes = [
        Node("mae", "pretrain", None),
        Node("head", "head", "mae"),
        Node("a", "tune", "head"),
        Node("b", "tune", "head"),
        Node("other", "import", None),
    ]
    assert columns_of(nodes) == {"mae": 0, "head": 1, "a": 2, "b": 2, "other": 0}
    rows, total = rows_of(nodes)
    assert total == 3 and rows == {"a": 0, "b": 1, "head": 0.5, "mae": 0.5, "other": 2}
    with pytest.raises(UserError, match="ct starts from unknown run 'gone'"):
        columns_of([Node("ct", "tune", "gone")])
