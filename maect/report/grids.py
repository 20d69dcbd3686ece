"""Confusion matrices and retrieved images (paper, figures 7, 9, 10 and 11)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maect.core.errors import UserError
from maect.report.style import WIDTH, blank, panels, save, styled

COLUMNS = 3
NAMED_CLASSES = 20  # with more, names would overlap
WRONG = "#D55E00"


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read named arrays of a safetensors file.

    Raises:
        UserError: no such file, not a safetensors file, or an array is not there.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the {path.stem} evaluation first") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UserError(f"{path}: has no `{missing[0]}`; run the {path.stem} evaluation again")
    return {name: tensors[name] for name in names}


def _names(labels: Sequence[int], class_names: Sequence[str] | None) -> list[str]:
    return [class_names[n] if class_names and 0 <= n < len(class_names) else str(n) for n in labels]


def confusion_figure(
    results: Mapping[str, Path],
    pdf: Path,
    png: Path,
    class_names: Sequence[str] | None = None,
    prefix: str = "",
) -> None:
    """Draw clusters against classes, in percent of each class, one panel a model.

    Args:
        results: panel title -> `clustering.safetensors`: `confusion` int64 [k, k], rows classes,
            columns the cluster that each class was matched to; `labels` int64 [n], class of each
            sample. A subset's arrays carry its prefix.
        pdf, png: where to.
        class_names: name of each class number.
        prefix: `dogs15_` for that subset.

    Raises:
        UserError: nothing to draw, or a file that cannot be read.
    """
    if not results:
        raise UserError("confusion figure: no run has the clustering evaluation")
    with styled():
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
                first = position % columns == 0
                ax.set_yticks(
                    range(len(known)), _names(known.tolist(), class_names) if first else []
                )
                if len(known) <= 12:
                    _write(ax, share)
            if position % columns == 0:
                ax.set_ylabel("class")
        figure.colorbar(image, ax=axes[: len(results)], shrink=0.7, label="% of the class")
        save(figure, pdf, png)


def _write(axes: Axes, share: np.ndarray) -> None:
    for row, column in np.argwhere(share >= 0.5):
        value = share[row, column]
        color = "black" if value > 55 else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=5.5, color=color)


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


def cluster_retrieval_figure(
    results: Mapping[str, Path], pdf: Path, png: Path, class_names: Sequence[str] | None = None
) -> None:
    """Draw the images nearest to each cluster's centre, one row a cluster, models side by side.

    Args:
        results: model title -> `retrieval.safetensors` with `cluster_images` uint8
            [k, n, S, S, 3], `cluster_labels` int64 [k, n] and `cluster_classes` int64 [k], the
            class that a cluster was matched to, -1 for none.
        pdf, png: where to.
        class_names: name of each class number.

    Raises:
        UserError: nothing to draw, or a file that cannot be read.
    """
    if not results:
        raise UserError("cluster_retrieval figure: no run has the retrieval evaluation")
    names = ["cluster_images", "cluster_labels", "cluster_classes"]
    read = {title: read_tensors(path, names) for title, path in results.items()}
    rows = max(len(arrays["cluster_images"]) for arrays in read.values())
    shown = min(arrays["cluster_images"].shape[1] for arrays in read.values())
    side = (WIDTH / len(read) - 0.9) / shown
    with styled():
        figure, axes = panels(1, len(read), height=rows * side + 0.3)
        for ax, (title, arrays) in zip(axes, read.items(), strict=True):
            classes = arrays["cluster_classes"].tolist()
            size = arrays["cluster_images"].shape[2]
            step = size + max(1, size // 12)
            # One picture of all tiles: an axes for each would take minutes to lay out.
            canvas = np.full((len(classes) * step, shown * step, 3), 255, np.uint8)
            for row, label in enumerate(classes):
                for rank in range(shown):
                    y, x = row * step, rank * step
                    canvas[y : y + size, x : x + size] = arrays["cluster_images"][row, rank]
                    if arrays["cluster_labels"][row, rank] != label:
                        _frame(ax, x, y, size)
            blank(ax)
            ax.imshow(canvas, interpolation="auto")
            ax.set_title(title)
            matched = [_names([n], class_names)[0] if n >= 0 else "no class" for n in classes]
            ax.set_yticks([row * step + size / 2 for row in range(len(classes))], matched)
            ax.tick_params(axis="y", length=0)
        save(figure, pdf, png)


def neighbor_retrieval_figure(
    results: Mapping[str, Path], pdf: Path, png: Path, class_names: Sequence[str] | None = None
) -> None:
    """Draw query images and their nearest neighbours, one row a model below each other.

    Args:
        results: row title -> `retrieval.safetensors` with `query_images` uint8 [q, S, S, 3],
            `query_labels` int64 [q], `neighbor_images` uint8 [q, n, S, S, 3] and `neighbor_labels`
            int64 [q, n], nearest first. All files have the same queries.
        pdf, png: where to.
        class_names: name of each class number.

    Raises:
        UserError: nothing to draw, a file that cannot be read, or other queries.
    """
    if not results:
        raise UserError("neighbor_retrieval figure: no run has the retrieval evaluation")
    names = ["query_images", "query_labels", "neighbor_images", "neighbor_labels"]
    read = {title: read_tensors(path, names) for title, path in results.items()}
    queries = next(iter(read.values()))["query_labels"]
    for title, arrays in read.items():
        if not np.array_equal(arrays["query_labels"], queries):
            raise UserError(
                f"{results[title]}: other queries than the first file's; evaluate again"
            )
    shown = min(arrays["neighbor_labels"].shape[1] for arrays in read.values())
    with styled():
        rows, columns = len(queries) * len(read), 1 + shown
        figure, axes = panels(rows, columns, height=WIDTH / (columns + 1) + 0.1)
        for query in range(len(queries)):
            for number, (title, arrays) in enumerate(read.items()):
                line = axes[(query * len(read) + number) * columns :][:columns]
                blank(line)
                line[0].set_ylabel(title, rotation=0, ha="right", va="center")
                if number == 0:
                    name = _names([int(queries[query])], class_names)[0]
                    _picture(line[0], arrays["query_images"][query], False, name)
                for rank in range(shown):
                    label = int(arrays["neighbor_labels"][query, rank])
                    wrong = label != queries[query]
                    name = _names([label], class_names)[0] if wrong else ""
                    image = arrays["neighbor_images"][query, rank]
                    _picture(line[1 + rank], image, wrong, name)
        save(figure, pdf, png)
