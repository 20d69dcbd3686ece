"""A schematic of an experiment: its runs as boxes, what starts from what as arrows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from maect.core.errors import UserError
from maect.report.style import WIDTH, blank, panels, save, styled

STAGES = ("pretrain", "import", "head", "tune")
TITLES = {
    "pretrain": "pre-training",
    "import": "public weights",
    "head": "head initialisation",
    "tune": "contrastive tuning",
}
# Light enough for black letters; told apart in gray as well.
FILLS = {"pretrain": "#56B4E9", "import": "#DDDDDD", "head": "#F0E442", "tune": "#F3B6A0"}
ROW = 0.24
"""Inches a run takes."""


@dataclass(frozen=True)
class Node:
    """A run: its name, its stage and the run it starts from."""

    name: str
    stage: str
    source: str | None


def columns_of(nodes: Sequence[Node]) -> dict[str, int]:
    """Column of each run: one further right than what it starts from."""
    by_name = {node.name: node for node in nodes}
    depth: dict[str, int] = {}

    def find(name: str) -> int:
        if name not in depth:
            source = by_name[name].source
            depth[name] = 0 if source is None else find(source) + 1
        return depth[name]

    for node in nodes:
        if node.source is not None and node.source not in by_name:
            raise UserError(f"pipeline figure: {node.name} starts from unknown run {node.source!r}")
        find(node.name)
    return depth


def rows_of(nodes: Sequence[Node]) -> tuple[dict[str, float], float]:
    """Height of each run, its descendants side by side below one another, and the total."""
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.source, []).append(node.name)
    rows: dict[str, float] = {}
    used = 0.0

    def place(name: str) -> float:
        nonlocal used
        below = [place(child) for child in children.get(name, [])]
        if not below:
            below, used = [used], used + 1
        rows[name] = (below[0] + below[-1]) / 2
        return rows[name]

    for root in children.get(None, []):
        place(root)
    return rows, used


def pipeline_figure(nodes: Sequence[Node], pdf: Path, png: Path) -> None:
    """Draw the runs of an experiment, from left (nothing) to right (tuned).

    Raises:
        UserError: no run, or one that starts from an unknown run.
    """
    if not nodes:
        raise UserError("pipeline figure: the experiment has no run")
    depth = columns_of(nodes)
    rows, total = rows_of(nodes)
    columns = max(depth.values()) + 1
    with styled():
        figure, (ax,) = panels(1, 1, height=total * ROW + 0.6)
        blank(ax)
        ax.set(xlim=(0, columns), ylim=(total - 0.4, -1.1))
        half = 0.36
        letters = max(len(node.name) for node in nodes)
        size = min(7.5, 0.72 * WIDTH / columns * 72 / letters / 0.62)
        stages = {depth[node.name]: node.stage for node in nodes}
        for column, stage in stages.items():
            same = {TITLES.get(n.stage, n.stage) for n in nodes if depth[n.name] == column}
            title = " / ".join(sorted(same)) if len(same) > 1 else TITLES.get(stage, stage)
            ax.text(column + 0.5, -0.85, title, ha="center", va="center", weight="bold")
        for node in nodes:
            x, y = depth[node.name] + 0.5, rows[node.name]
            ax.add_patch(
                FancyBboxPatch(
                    (x - half, y - 0.3), 2 * half, 0.6, boxstyle="round,pad=0,rounding_size=0.05",
                    mutation_aspect=4, facecolor=FILLS.get(node.stage, "white"),
                    edgecolor="#333333", linewidth=0.6,
                )
            )  # fmt: skip
            ax.text(x, y, node.name, ha="center", va="center", fontsize=size)
            if node.source is not None:
                start = (depth[node.source] + 0.5 + half, rows[node.source])
                ax.add_patch(
                    FancyArrowPatch(
                        start, (x - half, y), arrowstyle="-|>", mutation_scale=6, linewidth=0.7,
                        color="#555555", shrinkA=0, shrinkB=0,
                        connectionstyle="arc3,rad=0",
                    )
                )  # fmt: skip
        save(figure, pdf, png)
