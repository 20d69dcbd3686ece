"""Figures of boxes: confusion matrices, images in rows, and the runs of an experiment.

Figures 7, 9, 10 and 11 of the paper, and for the runs figure 4.
"""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from PIL import Image

from maect.core.errors import UserError
from maect.records import RunRecord
from maect.report.configs import ShownConfig
from maect.report.figures import (
    WIDTH,
    Classes,
    blank,
    finished_runs,
    panels,
    paper,
    read_tensors,
    result_files,
    setting,
    soft,
    stage_title,
)
from maect.stages import STAGES

COLUMNS = 2
NAMED_CLASSES = 20  # with more, names would overlap
WRONG = "#D55E00"
RECONSTRUCTED = ("visible", "predicted", "original")
"""Rows of a picture of reconstructions."""
NOT_EVALUATED = "No run was evaluated while it trained: add `online_evaluation` to the experiment."
# Light enough for black letters; told apart in gray as well.
FILLS = ("#56B4E9", "#F0E442", "#F3B6A0", "#A6D9C8", "#D9C2E6", "#C9B27C", "#B7D97A", "#8FA3C7")
NOT_TRAINED = "#DDDDDD"
LEGEND_COLUMNS = 4
ROW = 0.24
"""Inches a run takes."""


def confusion(shown: ShownConfig) -> Figure:
    """Draw clusters against classes, in percent of each class, one panel a model.

    Of all classes if they are few, else of the first subset there is. Reads
    `clustering.safetensors`: `confusion` int64 [k, k], rows classes, columns the cluster that each
    class was matched to; `labels` int64 [n], class of each sample; a subset's with its name before.
    """
    results, titles = result_files(shown), Classes(shown)
    first = next(iter(results.values()))
    many = len(np.unique(read_tensors(first, ["labels"])["labels"])) > NAMED_CLASSES
    subsets = setting(first.with_suffix(".json"), "subsets") or {}
    prefix = f"{next(iter(subsets))}_" if many and subsets else ""
    columns = min(len(results), COLUMNS)
    rows = -(-len(results) // columns)
    figure, axes = panels(rows, columns, height=min((WIDTH - 1) / columns, 3.6) + 0.7)
    for ax in axes[len(results) :]:
        ax.remove()
    for position, (ax, (title, path)) in enumerate(zip(axes, results.items(), strict=False)):
        arrays = read_tensors(path, [f"{prefix}confusion", f"{prefix}labels"])
        counts = arrays[f"{prefix}confusion"].astype(np.float64)
        known = np.unique(arrays[f"{prefix}labels"])
        totals = counts.sum(axis=1, keepdims=True)
        share = 100 * np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
        image = ax.imshow(share, cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
        ax.grid(False)
        ax.set_title(f"{title}\n{100 * np.trace(counts) / counts.sum():.1f} % on the diagonal")
        ax.set_xlabel("cluster")
        if len(known) <= NAMED_CLASSES:
            clusters = [f"C{n + 1}" for n in range(len(counts))]
            ax.set_xticks(range(len(counts)), clusters, rotation=90)
            names = [titles[int(n)] for n in known] if position % columns == 0 else []
            ax.set_yticks(range(len(known)), names)
            if len(known) <= 12:
                _write(ax, share)
        if position % columns == 0:
            ax.set_ylabel("class")
    figure.colorbar(image, ax=axes[: len(results)], shrink=0.7, label="% of the class")
    return figure


def _write(axes: Axes, share: np.ndarray) -> None:
    for row, column in np.argwhere(share > 0.5):  # 0.5 is rounded to 0
        value = share[row, column]
        color = "black" if value > 55 else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)


def _picture(axes: Axes, image: np.ndarray, wrong: bool, title: str = "") -> None:
    blank(axes)
    axes.imshow(image, interpolation="lanczos" if image.shape[0] > 32 else "nearest")
    if title:
        axes.set_title(title, fontsize=6.5, pad=2)
    if wrong:
        _frame(axes, 0, 0, image.shape[0])


def _frame(axes: Axes, x: float, y: float, size: int) -> None:
    """Mark a square picture whose upper left pixel is (x, y)."""
    corner = (x - 0.5, y - 0.5)
    axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor=WRONG, linewidth=2.0))


def _tiled(images: np.ndarray) -> tuple[np.ndarray, int]:
    """Return images [rows, columns, S, S, 3] as one picture with gaps, and the step between them.

    One picture: an axes for each would take minutes to lay out.
    """
    rows, columns, size = images.shape[:3]
    step = size + max(1, size // 12)
    page = np.uint8(np.array(to_rgb(paper())) * 255)
    canvas = np.full((rows * step - step + size, columns * step - step + size, 3), page, np.uint8)
    for row, column in np.ndindex(rows, columns):
        y, x = row * step, column * step
        canvas[y : y + size, x : x + size] = images[row, column]
    return canvas, step


def _label_rows(axes: Axes, names: Sequence[str], step: float) -> None:
    """Name the rows of a picture, each of which takes `step` pixels."""
    axes.set_yticks([(row + 0.45) * step for row in range(len(names))], names)
    axes.tick_params(axis="y", length=0)


def cluster_retrieval(shown: ShownConfig) -> Figure:
    """Draw the images nearest to each cluster's centre, one row a cluster, two models abreast.

    Reads `retrieval.safetensors`: `cluster_images` uint8 [k, n, S, S, 3], `cluster_labels` int64
    [k, n] and `cluster_classes` int64 [k], the class that a cluster was matched to, -1 for none.
    """
    results = result_files(shown)
    titles = Classes(shown)
    arrays_of = ["cluster_images", "cluster_labels", "cluster_classes"]
    read = {title: read_tensors(path, arrays_of) for title, path in results.items()}
    rows = max(len(arrays["cluster_images"]) for arrays in read.values())
    count = min(arrays["cluster_images"].shape[1] for arrays in read.values())
    across = min(COLUMNS, len(read))
    side = (WIDTH / across - 0.9) / count
    figure, axes = panels(math.ceil(len(read) / across), across, height=rows * side + 0.3)
    blank(axes)
    for ax, (title, arrays) in zip(axes, read.items(), strict=False):
        matches = arrays["cluster_classes"]
        canvas, step = _tiled(arrays["cluster_images"][:, :count])
        ax.imshow(canvas, interpolation="auto")
        wrong = arrays["cluster_labels"][:, :count] != matches[:, None]
        for row, rank in np.argwhere(wrong):
            _frame(ax, rank * step, row * step, arrays["cluster_images"].shape[2])
        ax.set_title(title)
        _label_rows(ax, [titles[n] if n >= 0 else "no class" for n in matches.tolist()], step)
    return figure


def neighbor_retrieval(shown: ShownConfig) -> Figure:
    """Draw images and their nearest neighbours, one row a model.

    Reads `retrieval.safetensors`: `query_images` uint8 [q, S, S, 3], `query_labels` int64 [q],
    `neighbor_images` uint8 [q, n, S, S, 3] and `neighbor_labels` int64 [q, n], nearest first, of
    the same queries for every model.
    """
    results, titles = result_files(shown), Classes(shown)
    names = ["query_images", "query_labels", "neighbor_images", "neighbor_labels"]
    read = {title: read_tensors(path, names) for title, path in results.items()}
    queries = next(iter(read.values()))["query_labels"]
    for title, arrays in read.items():
        if not np.array_equal(arrays["query_labels"], queries):
            raise UserError(
                f"{results[title]}: other queries than the first file's; evaluate again"
            )
    count = min(arrays["neighbor_labels"].shape[1] for arrays in read.values())
    rows = len(queries) * len(read)
    columns = 1 + count
    figure, axes = panels(rows, columns, height=WIDTH / (columns + 1) + 0.1)
    for query in range(len(queries)):
        for number, (title, arrays) in enumerate(read.items()):
            line = axes[(query * len(read) + number) * columns :][:columns]
            blank(line)
            line[0].set_ylabel(title, rotation=0, ha="right", va="center")
            if number == 0:
                name = titles[int(queries[query])]
                _picture(line[0], arrays["query_images"][query], False, name)
            for rank in range(count):
                label = int(arrays["neighbor_labels"][query, rank])
                wrong = label != queries[query]
                name = titles[label] if wrong else ""
                image = arrays["neighbor_images"][query, rank]
                _picture(line[1 + rank], image, wrong, name)
    return figure


def online_pictures(shown: ShownConfig) -> Figure:
    """Draw the first, middle and last pictures of online evaluation of every run behind the rows.

    Of each pre-training `reconstructions`: visible patches, what is made of them, and the image. Of
    each training `neighbors_in_training`: images (left) and the nearest others.
    """
    name = shown.name.removesuffix("_in_training")
    drawn: list[tuple[str, Path]] = []
    for node in finished_runs(shown):
        files = sorted((shown.runs / node.run / "online").glob(f"{name}-*.jpg"))
        chosen = dict.fromkeys((0, len(files) // 2, len(files) - 1)) if files else ()
        for number in chosen:
            drawn.append((f"{node.run}, step {int(files[number].stem[-8:]):,}", files[number]))
    if not drawn:
        figure, axes = panels(1, 1, height=1.0)
        blank(axes)
        axes[0].text(0.5, 0.5, NOT_EVALUATED, ha="center", va="center")
        return figure
    is_mae = name == "reconstructions"
    sheets = [np.asarray(Image.open(path)) for _, path in drawn]
    columns = 1 if is_mae else min(2, len(drawn))
    tallest = max(len(sheet) / sheet.shape[1] for sheet in sheets)
    rows = -(-len(drawn) // columns)
    figure, axes = panels(rows, columns, height=WIDTH / columns * tallest + 0.3)
    blank(axes)
    for ax, (title, _), sheet in zip(axes, drawn, sheets, strict=False):
        ax.imshow(sheet, interpolation="auto")
        ax.set_title(title)
        if is_mae:
            _label_rows(ax, RECONSTRUCTED, len(sheet) / len(RECONSTRUCTED))
    return figure


def columns_of(nodes: Sequence[RunRecord]) -> dict[str, int]:
    """Return each run's column: one right of the run that it starts from; sources first."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.run] = 0 if node.source is None else depth[node.source] + 1
    return depth


def rows_of(nodes: Sequence[RunRecord]) -> tuple[dict[str, float], float]:
    """Return each run's row, descendants below one another, and the number of rows."""
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.source, []).append(node.run)
    rows: dict[str, float] = {}
    used = 0.0

    def set_row(name: str) -> float:
        nonlocal used
        below = [set_row(child) for child in children.get(name, [])]
        if not below:
            below = [used]
            used = used + 1
        rows[name] = (below[0] + below[-1]) / 2
        return rows[name]

    for root in children.get(None, []):
        set_row(root)
    return rows, used


def fills() -> dict[str, str]:
    """Return the colour of each stage."""
    trained = [name for name, stage in STAGES.items() if stage.trains]
    return dict.fromkeys(STAGES, NOT_TRAINED) | dict(zip(trained, cycle(FILLS), strict=False))


def pipeline(shown: ShownConfig) -> Figure:
    """Draw the finished runs behind the rows, from left (nothing) to right (tuned)."""
    nodes = finished_runs(shown)
    if not nodes:
        raise UserError("pipeline figure: the experiment has no run")
    depth = columns_of(nodes)
    rows, total = rows_of(nodes)
    columns = max(depth.values()) + 1
    colors = fills()
    stages = [stage for stage in colors if any(node.stage == stage for node in nodes)]
    lines = -(-len(stages) // LEGEND_COLUMNS)
    figure, (ax,) = panels(1, 1, height=(total + lines) * ROW + 0.1)
    blank(ax)
    ax.set(xlim=(0, columns), ylim=(total - 0.4, -0.6))
    half = 0.36
    letters = max(len(node.run) for node in nodes)
    size = min(7.5, 0.72 * WIDTH / columns * 72 / letters / 0.62)
    handles = [Patch(facecolor=colors[one], edgecolor=soft(), linewidth=0.6) for one in stages]
    titles = [stage_title(one) for one in stages]
    figure.legend(handles, titles, loc="outside upper center", ncols=LEGEND_COLUMNS)
    for node in nodes:
        x = depth[node.run] + 0.5
        y = rows[node.run]
        ax.add_patch(
            FancyBboxPatch(
                (x - half, y - 0.3), 2 * half, 0.6, boxstyle="round,pad=0,rounding_size=0.05",
                mutation_aspect=4, facecolor=colors.get(node.stage, NOT_TRAINED),
                edgecolor=soft(), linewidth=0.6,
            )
        )  # fmt: skip
        ax.text(x, y, node.run, ha="center", va="center", fontsize=size, color="black")
        if node.source is not None:
            start = (depth[node.source] + 0.5 + half, rows[node.source])
            ax.add_patch(
                FancyArrowPatch(
                    start, (x - half, y), arrowstyle="-|>", mutation_scale=6, linewidth=0.7,
                    color=soft(), shrinkA=0, shrinkB=0,
                    connectionstyle="arc3,rad=0",
                )
            )  # fmt: skip
    return figure
