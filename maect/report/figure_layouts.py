"""What each figure reads and how the report lists it; `layouts.py` is the same for the tables."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from maect.report.layouts import SHOTS, layout


@dataclass(frozen=True)
class FigureLayout:
    """One figure."""

    title: str
    paper: str
    """Where it is in the paper; empty: nowhere."""
    needs: tuple[str, ...] = ()
    """The evaluations that it reads: it can be drawn of rows that have one of them,"""
    besides: tuple[str, ...] = ()
    """and then also shows these."""
    reads_runs: bool = False
    """Whether it also reads the records of all runs behind its rows."""
    names_classes: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """All evaluations that it reads."""
        return (*self.needs, *self.besides)


_LABELS = (*(name for metric in SHOTS for name in (metric.protocol, *metric.instead)), "fine_tune")
FIGURE_LAYOUTS = {
    "cluster_formation": FigureLayout(
        "Formation of clusters",
        "Figure 1",
        ("umap_all", "umap"),
        ("clustering",),
        names_classes=True,
    ),
    "gpu_hours": FigureLayout(
        "Probing accuracy against GPU hours", "Figure 2", ("linear_probe",), reads_runs=True
    ),
    "label_efficiency": FigureLayout("Accuracy against labels", "Figure 3", _LABELS),
    "pipeline": FigureLayout("Runs and what starts from what", "Figure 4", reads_runs=True),
    "color_histogram": FigureLayout(
        "Colour histogram error by block", "Figure 5", ("color_histogram",)
    ),
    "umap": FigureLayout(
        "UMAP embeddings", "Figure 6", ("umap",), ("clustering",), names_classes=True
    ),
    "confusion": FigureLayout(
        "Clusters against classes", "Figure 9", ("clustering",), names_classes=True
    ),
    "cluster_retrieval": FigureLayout(
        "Images nearest to cluster centres", "Figure 10", ("retrieval",), names_classes=True
    ),
    "neighbor_retrieval": FigureLayout(
        "Nearest neighbours", "Figure 11", ("retrieval",), names_classes=True
    ),
    "training_curves": FigureLayout("Training curves", "", reads_runs=True),
}


def can_show(
    name: str,
    figure: bool,
    rows: Iterable[tuple[str, str, list[str]]],
    asked: Collection[tuple[str, str]],
) -> bool:
    """Whether a table or figure has anything to show.

    Args:
        name: which.
        figure: not a table.
        rows: its lines, as (architecture, method, runs).
        asked: evaluations that are made, as (run, name).
    """
    needs = FIGURE_LAYOUTS[name].needs if figure else ()
    if figure and not needs:
        return True
    return any(
        (run, need) in asked
        for _, method, runs in rows
        for run in runs
        for need in (needs or layout(name).needs_of(method))
    )


def report_labels(name: str, figure: bool) -> dict[str, str]:
    """How the report lists a table or a figure: sorted by text, this is the paper's order."""
    one = FIGURE_LAYOUTS[name] if figure else layout(name)
    kind, _, number = one.paper.partition(" ")
    # A space sorts before a digit. One label only: of two, Snakemake makes one a switch where
    # there are two results, and then shows nothing.
    text = f"{kind} {number:>2}: {one.title}" if number else f"{one.title} (not in the paper)"
    return {"figure" if figure else "table": text}
