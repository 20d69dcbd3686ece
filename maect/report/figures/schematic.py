"""A schematic of an experiment: its runs as boxes, arrows from each run to its successors."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from maect.core.errors import UserError
from maect.records import RunRecord
from maect.report.configs import ShownConfig
from maect.report.figures import WIDTH, blank, panels, soft
from maect.report.figures.data import finished_runs, stage_title
from maect.stages import STAGES

# Light enough for black letters; told apart in gray as well.
FILLS = ("#56B4E9", "#F0E442", "#F3B6A0", "#A6D9C8", "#D9C2E6", "#C9B27C", "#B7D97A", "#8FA3C7")
NOT_TRAINED = "#DDDDDD"
LEGEND_COLUMNS = 4
ROW = 0.24
"""Inches a run takes."""


def columns_of(nodes: Sequence[RunRecord]) -> dict[str, int]:
    """Return each run's column: one further right than the run it starts from."""
    depth: dict[str, int] = {}
    for node in nodes:
        if node.source is not None and node.source not in depth:
            raise UserError(f"pipeline figure: {node.run} starts from unknown run {node.source!r}")
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
