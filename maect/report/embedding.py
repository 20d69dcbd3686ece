"""UMAP embeddings side by side, with their cluster accuracy (paper, figures 1, 6 and 8)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maect.core.errors import UserError
from maect.report.style import WIDTH, blank, class_style, panels, save, styled

LEGEND_CLASSES = 32  # as many as have a look of their own
COLUMNS = 4
SHORT = 3  # letters
DENSE = 5000  # points above which a PDF holds a picture of them instead of each one


@dataclass(frozen=True)
class Panel:
    """One embedding: its title, `umap.safetensors` and its cluster accuracy in percent."""

    title: str
    points: Path
    accuracy: float | None = None


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read `points` (float [n, 2]) and `labels` (int [n], -1 unlabelled).

    Raises:
        UserError: no such file, or not points and labels of these shapes.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the umap evaluation first") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None
    if {"points", "labels"} - tensors.keys():
        raise UserError(f"{path}: has no `points` and `labels`; run the umap evaluation again")
    points, labels = tensors["points"], tensors["labels"]
    if points.ndim != 2 or points.shape[1] != 2 or labels.shape != points.shape[:1]:
        raise UserError(f"{path}: points {points.shape} and labels {labels.shape} do not fit")
    if not np.isfinite(points).all():
        raise UserError(f"{path}: points that are not finite numbers; run umap again")
    return points.astype(np.float64), labels.astype(np.int64)


def _scatter(axes: Axes, points: np.ndarray, labels: np.ndarray, known: Sequence[int]) -> None:
    size = float(np.clip(9000 / max(len(points), 1), 0.4, 14))
    options: dict[str, Any] = {
        "s": size,
        "linewidths": 0,
        "alpha": 0.75,
        "rasterized": len(points) > DENSE,
    }
    if len(known) > LEGEND_CLASSES:  # neighbouring numbers, similar colours: super-classes show
        order = np.random.default_rng(0).permutation(len(points))
        axes.scatter(points[order, 0], points[order, 1], c=labels[order], cmap="viridis", **options)
        return
    for number in np.unique(labels):
        # Labels that are missing are gray; the others look the same in every panel.
        color, marker = ("#999999", ".") if number < 0 else class_style(known.index(int(number)))
        mine = points[labels == number]
        axes.scatter(mine[:, 0], mine[:, 1], color=color, marker=marker, **options)


def _names(axes: Axes, points: np.ndarray, labels: np.ndarray, names: dict[int, str]) -> None:
    """Short names are written where the class is, so that nobody needs the colours."""
    for number, name in names.items():
        if len(name) <= SHORT and (labels == number).any():
            x, y = np.median(points[labels == number], axis=0)
            halo = [withStroke(linewidth=2.5, foreground="white")]
            axes.text(x, y, name, weight="bold", ha="center", va="center", path_effects=halo)


def _square(axes: Axes, points: np.ndarray) -> None:
    """Limits that fill a square panel with one scale for both axes."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.53 * max(float((high - low).max()), 1e-9)
    x, y = (low + high) / 2
    axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    axes.set_box_aspect(1)


def umap_figure(
    shown: Sequence[Panel], pdf: Path, png: Path, class_names: Sequence[str] | None = None
) -> None:
    """Draw the embeddings as panels of one figure.

    Args:
        shown: at least one.
        class_names: name of each label; none: its number.

    Raises:
        UserError: nothing to draw, or a file that cannot be read.
    """
    if not shown:
        raise UserError("umap figure: no run has an embedding; run the umap evaluation first")
    data = [read_points(panel.points) for panel in shown]
    known = sorted({int(number) for _, labels in data for number in labels if number >= 0})
    few = known if len(known) <= LEGEND_CLASSES else []
    names = {n: class_names[n] if class_names else str(n) for n in few}
    columns = (
        len(shown) if len(shown) <= COLUMNS else math.ceil(len(shown) / -(-len(shown) // COLUMNS))
    )
    rows = math.ceil(len(shown) / columns)
    with styled():
        figure, axes = panels(rows, columns, height=min(WIDTH / columns, 4.0) + 0.5)
        blank(axes)
        for ax, panel, (points, labels) in zip(axes, shown, data, strict=False):
            _scatter(ax, points, labels, known)
            _square(ax, points)
            _names(ax, points, labels, names)
            ax.spines[:].set_visible(True)
            ax.spines[:].set_color("#BBBBBB")
            accuracy = (
                "" if panel.accuracy is None else f"\ncluster accuracy {panel.accuracy:.1f} %"
            )
            ax.set_title(panel.title + accuracy)
        if names:
            handles = []
            for position in range(len(known)):
                color, marker = class_style(position)
                handles.append(
                    Line2D([], [], color=color, marker=marker, linestyle="", markersize=5)
                )
            most = 10 if max(map(len, names.values())) <= SHORT else 4
            figure.legend(
                handles, list(names.values()), loc="outside lower center",
                ncols=min(most, len(names)), handletextpad=0.1,
            )  # fmt: skip
        save(figure, pdf, png)
