"""UMAP embeddings side by side, with their cluster accuracy (paper, figures 1, 6 and 8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath

from maect.core.errors import UserError, entry
from maect.report.configs import Row, ShownConfig
from maect.report.figures import (
    WIDTH,
    Classes,
    blank,
    class_style,
    panels,
    paper,
    read_tensors,
    result_files,
    row_title,
    setting,
    soft,
)
from maect.report.registry import FIGURES
from maect.report.tables import measured, paper_value

LEGEND_CLASSES = 32  # as many as have a style of their own
COLUMNS = 3
SHORT = 3  # letters
LONGEST = 14  # letters of a name in a panel
NAME_SIZE = 6.5
COVERED = 0.25
"""Part of a panel that names may take."""
RADII = (0.04, 0.07, 0.1, 0.14, 0.18, 0.24, 0.3)
"""Distances from a class at which its name is tried, in parts of a panel."""
_BOLD = FontProperties(family="DejaVu Sans", weight="bold")
MISSING = {"color": "#999999", "marker": "."}
DENSE = 5000  # points above which a PDF holds a picture of them instead of each one


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read `points` (float [n, 2]) and `labels` (int [n], -1 unlabelled)."""
    tensors = read_tensors(path, ["points", "labels"])
    return tensors["points"].astype(np.float64), tensors["labels"].astype(np.int64)


def _scatter(axes: Axes, points: np.ndarray, labels: np.ndarray, known: Sequence[int]) -> None:
    size = float(np.clip(9000 / max(len(points), 1), 0.4, 14))
    dense = len(points) > DENSE
    options: dict[str, Any] = {"s": size, "linewidths": 0, "alpha": 0.75, "rasterized": dense}
    order = np.random.default_rng(0).permutation(len(points))  # where points overlap, no class wins
    points, labels = points[order], labels[order]
    if len(known) > LEGEND_CLASSES:  # neighbouring numbers, similar colours: super-classes show
        axes.scatter(points[:, 0], points[:, 1], c=labels, cmap="viridis", **options)
        return
    styles = {number: class_style(position) for position, number in enumerate(known)}
    looks = [styles.get(number, MISSING) for number in labels.tolist()]
    colors = np.array([look["color"] for look in looks])
    markers = np.array([look["marker"] for look in looks])
    for marker in dict.fromkeys(markers.tolist()):
        own = markers == marker
        x, y = points[own].T
        axes.scatter(x, y, c=colors[own], marker=marker, **options)


def _names(
    axes: Axes, points: np.ndarray, labels: np.ndarray, names: dict[int, str], inches: float
) -> None:
    """Write names next to the classes, so that nobody needs the colours.

    Where they would cover much of the panel there is only the legend.
    """
    here = [number for number in names if (labels == number).any()]
    full = [names[number] for number in here]
    texts = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in full]
    widths = [TextPath((0, 0), text, NAME_SIZE, prop=_BOLD).get_extents().width for text in texts]
    sizes = np.array([[width + 3, 1.3 * NAME_SIZE] for width in widths]) / 72 / inches
    if not here or sizes.prod(axis=1).sum() > COVERED:
        return
    centers = np.stack([np.median(points[labels == number], axis=0) for number in here])
    low, high = np.stack([axes.get_xlim(), axes.get_ylim()], axis=1)
    extent = high - low
    spots = free_spots((points - low) / extent, (centers - low) / extent, sizes) * extent + low
    halo = [withStroke(linewidth=2.0, foreground=paper())]
    line = {"arrowstyle": "-", "color": soft(), "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
    for text, center, spot in zip(texts, centers, spots, strict=True):
        axes.annotate(
            text, center, spot, size=NAME_SIZE, weight="bold", ha="center", va="center",
            path_effects=halo, arrowprops=line, in_layout=False,
        )  # fmt: skip


def free_spots(points: np.ndarray, centers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return where to write names: near their classes, on few points and on no other name.

    Args:
        points: of all classes, in the unit square, [p, 2].
        centers: of the classes, [n, 2].
        sizes: width and height of each name, [n, 2].
    """
    points = points[:: max(1, len(points) // 2000)]
    angles = np.arange(16) * np.pi / 8
    around = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    steps = np.concatenate([[[0.0, 0.0]], *(radius * around for radius in RADII)])
    spots = np.zeros_like(centers)
    for number, (center, size) in enumerate(zip(centers, sizes, strict=True)):
        tried = np.clip(center + steps, size / 2, 1 - size / 2)
        inside = np.abs(points[None] - tried[:, None]) < size / 2
        on_points = inside.all(axis=2).mean(axis=1)
        gaps = np.abs(spots[None, :number] - tried[:, None]) - (sizes[:number] + size) / 2
        on_names = (gaps.max(axis=2) < 0).sum(axis=1)
        cost = 20 * on_points + np.linalg.norm(tried - center, axis=1) + 10 * on_names
        spots[number] = tried[cost.argmin()]
    return spots


def _square(axes: Axes, points: np.ndarray) -> None:
    """Set limits that fill a square panel with one scale for both axes."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.53 * max(float((high - low).max()), 1e-9)
    x, y = (low + high) / 2
    axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    axes.set_box_aspect(1)


def umap(shown: ShownConfig) -> Figure:
    """Draw UMAP embeddings side by side, with the accuracy of k-means on the features."""
    rows = {row_title(row, shown.rows): row for row in shown.rows}
    files, classes = result_files(shown), Classes(shown)
    read = [read_points(path) for path in files.values()]
    data = [(points, classes.of(labels)) for points, labels in read]
    known = sorted({int(number) for _, labels in data for number in labels if number >= 0})
    names = {n: classes[n] for n in known} if len(known) <= LEGEND_CLASSES else {}
    lines = -(-len(files) // COLUMNS)
    columns = -(-len(files) // lines)
    height = min(WIDTH / columns, 4.0)
    figure, axes = panels(lines, columns, height=height + 0.5)
    blank(axes)
    for ax, (title, path), (points, labels) in zip(axes, files.items(), data, strict=False):
        _scatter(ax, points, labels, known)
        _square(ax, points)
        ax.spines[:].set_visible(True)
        ax.spines[:].set_color(soft())
        ax.set_title(title + _accuracy(shown, rows[title], path))
    if names:
        styles = [class_style(n) for n in range(len(known))]
        titles = [*names.values()]
        if classes.are_groups and any((labels < 0).any() for _, labels in data):
            styles.append(MISSING)
            titles.append("others")
        handles = [Line2D([], [], **style, linestyle="", markersize=5) for style in styles]
        most = 10 if max(map(len, titles)) <= SHORT else 5 if classes.are_groups else 4
        figure.legend(
            handles, titles, loc="outside lower center",
            ncols=min(most, len(titles)), handletextpad=0.1,
        )  # fmt: skip
        figure.draw_without_rendering()  # panels get their size by what is around them
        for ax, (points, labels) in zip(axes, data, strict=False):
            _names(ax, points, labels, names, ax.get_window_extent().width / figure.dpi)
    return figure


def _accuracy(shown: ShownConfig, row: Row, points: Path) -> str:
    """Return a line with the k-means accuracy on the embedded classes; "" if not evaluated."""
    (clustering,) = entry(shown.name, FIGURES, "figure").besides
    classes = setting(points.with_suffix(".json"), "classes") or []
    subsets = setting(points.with_name(f"{clustering}.json"), "subsets") or {}
    names = [name for name, subset in subsets.items() if subset == classes] if classes else [""]
    if not names:
        return ""
    key = f"{names[0]}_accuracy".removeprefix("_")
    accuracy = measured(shown.evaluations, row.runs[:1], [clustering], key)[0]
    if accuracy is None:
        return ""
    table = {"": "clustering_best", "dogs15": "dogs15_best"}.get(names[0])
    paper = None
    if table and shown.compare_with_paper:
        paper = paper_value(table, row.architecture, row.method, "accuracy")
    beside = "" if paper is None else f" (paper {paper:.1f} %)"
    return f"\ncluster accuracy {accuracy:.1f} %{beside}"


def cluster_formation(shown: ShownConfig) -> Figure:
    """Draw all classes by the largest MAE before and after tuning with minimal augmentation."""
    tuned = [row.architecture for row in shown.rows if row.method == "ct_min"]
    if not tuned:
        raise UserError("cluster_formation figure: no row has the method ct_min")
    largest = list(dict.fromkeys(tuned))[-1]
    rows: list[Row] = [
        row for row in shown.rows if row.architecture == largest and row.method in ("mae", "ct_min")
    ]
    return umap(shown.model_copy(update={"rows": rows}))
