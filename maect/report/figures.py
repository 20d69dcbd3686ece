"""Each figure by its name, from the rows of an experiment and the folder of its evaluations.

All functions have one signature: rows, the folder `evaluations` (its neighbours are `runs` and the
rest of an experiment's results), PDF, PNG and the names of the classes; those in `COMPARED` also
take whether to show the paper's numbers. Of several seeds the first is drawn where a figure shows
one model; rows that have nothing to show are left out.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.core.files import read_json
from maect.report.cost import chain, cost_table
from maect.report.curves import training_curves as draw_curves
from maect.report.embedding import Panel, umap_figure
from maect.report.grids import (
    NAMED_CLASSES,
    cluster_retrieval_figure,
    confusion_figure,
    neighbor_retrieval_figure,
    read_tensors,
)
from maect.report.registry import architecture_title, method_title
from maect.report.schematic import TITLES, Node, pipeline_figure
from maect.report.series import (
    color_histogram_figure,
    gpu_hours_figure,
    label_efficiency_figure,
    points_of,
)
from maect.report.tables import Row, build_table, measured

Names = Sequence[str] | None


def title(row: Row, rows: Sequence[Row]) -> str:
    """How a row is named in a figure: with its architecture where there are several."""
    method = method_title(row.method)
    if len({one.architecture for one in rows}) == 1:
        return method
    return f"{method}, {architecture_title(row.architecture)}"


def files(rows: Sequence[Row], evaluations: Path, name: str) -> dict[str, Path]:
    """A result file of each row's first run, by the row's title, where there is one."""
    found = {title(row, rows): evaluations / row.runs[0] / name for row in rows if row.runs}
    return {key: path for key, path in found.items() if path.exists()}


def _accuracy(evaluations: Path, run: str, embedding: str) -> float | None:
    """Accuracy of k-means on the classes that an embedding shows, if that was evaluated."""
    shown = _setting(evaluations / run / f"{embedding}.json", "classes") or []
    subsets = _setting(evaluations / run / "clustering.json", "subsets") or {}
    keys = [f"{name}_accuracy" for name, classes in subsets.items() if classes == shown]
    keys = ["accuracy"] if not shown else keys
    return measured(evaluations, [run], ["clustering"], keys[0])[0] if keys else None


def _setting(result: Path, key: str) -> Any:
    return read_json(result).get("settings", {}).get(key) if result.exists() else None


def umap(
    rows: Sequence[Row],
    evaluations: Path,
    pdf: Path,
    png: Path,
    names: Names = None,
    embedding: str = "umap",
) -> None:
    """UMAP embeddings side by side, with the accuracy of k-means on the features."""
    shown = []
    for name, points in files(rows, evaluations, f"{embedding}.safetensors").items():
        shown.append(Panel(name, points, _accuracy(evaluations, points.parent.name, embedding)))
    umap_figure(shown, pdf, png, names)


def cluster_formation(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """The largest MAE and the same after tuning with minimal augmentation, all classes embedded."""
    pairs = {
        row.architecture: [one for one in rows if one.architecture == row.architecture]
        for row in rows
        if row.method == "ct_min"
    }
    if not pairs:
        raise UserError("cluster_formation figure: no row has the method ct_min")
    last = [one for one in list(pairs.values())[-1] if one.method in ("mae", "ct_min")]
    # Where `umap` shows some classes only, the experiment has one of all.
    every = "umap_all" if files(last, evaluations, "umap_all.safetensors") else "umap"
    umap(last, evaluations, pdf, png, names, every)


def confusion(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """Clusters against classes: of all if they are few, else of the first subset there is."""
    found = files(rows, evaluations, "clustering.safetensors")
    prefix = ""
    for path in list(found.values())[:1]:
        classes = len(np.unique(read_tensors(path, ["labels"])["labels"]))
        subsets = _setting(path.with_suffix(".json"), "subsets") or {}
        prefix = f"{next(iter(subsets))}_" if classes > NAMED_CLASSES and subsets else ""
    confusion_figure(found, pdf, png, names, prefix)


def cluster_retrieval(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """The images nearest to the clusters' centres, of the first two models."""
    found = files(rows, evaluations, "retrieval.safetensors")
    cluster_retrieval_figure(dict(list(found.items())[:2]), pdf, png, names)


def neighbor_retrieval(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """Images and their nearest neighbours."""
    neighbor_retrieval_figure(files(rows, evaluations, "retrieval.safetensors"), pdf, png, names)


def color_histogram(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """Histogram prediction error by block."""
    color_histogram_figure(files(rows, evaluations, "color_histogram.json"), pdf, png)


def gpu_hours(
    rows: Sequence[Row],
    evaluations: Path,
    pdf: Path,
    png: Path,
    names: Names = None,
    paper: bool = True,
) -> None:
    """Probing accuracy against device hours."""
    probed = build_table("low_shot", rows, evaluations, paper)
    cost = cost_table(rows, evaluations.parent / "runs")
    gpu_hours_figure(points_of(probed, cost), pdf, png)


def label_efficiency(
    rows: Sequence[Row],
    evaluations: Path,
    pdf: Path,
    png: Path,
    names: Names = None,
    paper: bool = True,
) -> None:
    """Accuracy against the number of labels."""
    low_shot = build_table("low_shot", rows, evaluations, paper)
    label_efficiency_figure(low_shot, build_table("fine_tune", rows, evaluations, paper), pdf, png)


def _runs(rows: Sequence[Row], runs: Path) -> dict[str, Node]:
    """The rows' first finished runs and all they started from, sources first."""
    nodes: dict[str, Node] = {}
    for row in rows:
        for run in row.runs[:1]:
            if (runs / run / "run.json").exists():
                for record in reversed(chain(run, runs)):
                    name = str(record["run"])
                    nodes[name] = Node(name, str(record["stage"]), record.get("source"))
    return nodes


def training_curves(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """Loss over epochs of every stage behind the rows."""
    runs = evaluations.parent / "runs"
    stages: dict[str, dict[str, Path]] = {TITLES[stage]: {} for stage in TITLES}
    for node in _runs(rows, runs).values():
        path = runs / node.name / "metrics.jsonl"
        if path.exists():
            stages.setdefault(TITLES.get(node.stage, node.stage), {})[node.name] = path
    draw_curves(stages, pdf, png)


def pipeline(
    rows: Sequence[Row], evaluations: Path, pdf: Path, png: Path, names: Names = None
) -> None:
    """The finished runs behind the rows and what started from what."""
    pipeline_figure(list(_runs(rows, evaluations.parent / "runs").values()), pdf, png)


FIGURES: dict[str, Callable[..., None]] = {
    "gpu_hours": gpu_hours,
    "label_efficiency": label_efficiency,
    "color_histogram": color_histogram,
    "umap": umap,
    "cluster_formation": cluster_formation,
    "confusion": confusion,
    "cluster_retrieval": cluster_retrieval,
    "neighbor_retrieval": neighbor_retrieval,
    "training_curves": training_curves,
    "pipeline": pipeline,
}
# These show the paper's numbers beside what was measured, unless they are told not to.
COMPARED = ("gpu_hours", "label_efficiency")


def draw(
    name: str,
    rows: Sequence[Row],
    evaluations: Path,
    pdf: Path,
    png: Path,
    names: Names = None,
    paper: bool = True,
) -> None:
    """Draw one figure by its name, with or without the paper's numbers.

    Raises:
        UserError: no such figure, nothing to draw, or a result that cannot be read.
    """
    if name not in FIGURES:
        raise UserError(f"unknown figure {name!r}; known: {', '.join(FIGURES)}")
    compared = {"paper": paper} if name in COMPARED else {}
    FIGURES[name](rows, evaluations, pdf, png, names, **compared)
