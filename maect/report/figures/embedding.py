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
from maect.report.figures import CLASS_COLORS, WIDTH, blank, class_style, panels
from maect.report.figures.data import Classes, read_tensors, result_files, row_title, setting
from maect.report.registry import FIGURES
from maect.report.tables import measured, paper_value

LEGEND_CLASSES = 32  # as many as have a style of their own
COLUMNS = 4
SHORT = 3  # letters
LONGEST = 14  # letters of a name in a panel
NAME_SIZE = 6.5
COVERED = 0.25
"""Part of a panel that names may take."""
_BOLD = FontProperties(family="DejaVu Sans", weight="bold")
MISSING = {"color": "#999999", "marker": "."}
DENSE = 5000  # points above which a PDF holds a picture of them instead of each one


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read `points` (float [n, 2]) and `labels` (int [n], -1 unlabelled)."""
    tensors = read_tensors(path, ["points", "labels"])
    points, labels = tensors["points"], tensors["labels"]
    if points.ndim != 2 or points.shape[1] != 2 or labels.shape != points.shape[:1]:
        raise UserError(f"{path}: points {points.shape} and labels {labels.shape} do not fit")
    if not np.isfinite(points).all():
        raise UserError(f"{path}: points that are not finite numbers; run umap again")
    return points.astype(np.float64), labels.astype(np.int64)


def _scatter(axes: Axes, points: np.ndarray, labels: np.ndarray, known: Sequence[int]) -> None:
    dense = len(points) > DENSE
    size = float(np.clip(9000 / max(len(points), 1), 0.4, 14))
    options: dict[str, Any] = {"s": size, "linewidths": 0, "alpha": 0.75, "rasterized": dense}
    order = np.random.default_rng(0).permutation(len(points))
    x, y = points[order].T
    if len(known) > LEGEND_CLASSES:  # neighbouring numbers, similar colours: super-classes show
        axes.scatter(x, y, c=labels[order], cmap="viridis", **options)
        return
    if dense and len(known) <= len(CLASS_COLORS):  # where points overlap, no class wins
        styles = {number: class_style(position) for position, number in enumerate(known)}
        colors = [styles.get(number, MISSING)["color"] for number in labels[order].tolist()]
        axes.scatter(x, y, c=colors, **options)
        return
    for number in np.unique(labels):
        # Labels that are missing are gray; the others look the same in every panel.
        style = MISSING if number < 0 else class_style(known.index(int(number)))
        x, y = points[labels == number].T
        axes.scatter(x, y, **style, **options)


def _names(
    axes: Axes, points: np.ndarray, labels: np.ndarray, names: dict[int, str], inches: float
) -> None:
    """Write names where the classes are, so that nobody needs the colours.

    Those that would overlap are moved apart; where they would cover much of the panel there is only
    the legend.
    """
    here = [number for number in names if (labels == number).any()]
    full = [names[number] for number in here]
    texts = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in full]
    widths = [TextPath((0, 0), text, NAME_SIZE, prop=_BOLD).get_extents().width for text in texts]
    sizes = np.array([[width + 2, 1.2 * NAME_SIZE] for width in widths]) / 72 / inches
    if not here or sizes.prod(axis=1).sum() > COVERED:
        return
    centers = np.stack([np.median(points[labels == number], axis=0) for number in here])
    low, high = np.stack([axes.get_xlim(), axes.get_ylim()], axis=1)
    spots = moved_apart((centers - low) / (high - low), sizes) * (high - low) + low
    halo = [withStroke(linewidth=2.0, foreground="white")]
    for text, (x, y) in zip(texts, spots, strict=True):
        axes.text(
            x, y, text, size=NAME_SIZE, weight="bold", ha="center", va="center", path_effects=halo,
            in_layout=False,
        )  # fmt: skip


def moved_apart(centers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Move centres of boxes in the unit square up and down until none overlaps another.

    Args:
        centers: where they should be, [n, 2].
        sizes: width and height of each, [n, 2].
    """
    spots = np.clip(centers, sizes / 2, 1 - sizes / 2)
    for _ in range(200):
        moved = False
        for i in range(len(spots)):
            for j in range(i):
                gap = np.abs(spots[i] - spots[j]) - (sizes[i] + sizes[j]) / 2
                if gap.max() >= -1e-9:
                    continue
                step = -gap[1] / 2 * (1 if spots[i, 1] >= spots[j, 1] else -1)
                spots[i, 1], spots[j, 1] = spots[i, 1] + step, spots[j, 1] - step
                moved = True
        spots = np.clip(spots, sizes / 2, 1 - sizes / 2)
        if not moved:
            break
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
        ax.spines[:].set_color("#BBBBBB")
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
