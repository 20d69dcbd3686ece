"""Training curves from the runs' `metrics.jsonl`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.report.style import COLORS, LINES, panels, save, styled

POINTS = 200  # more than a page shows: longer curves are averaged down to this


def read_metrics_lines(path: Path) -> list[dict[str, Any]]:
    """Read a run's `metrics.jsonl`, one object a logged step.

    Raises:
        UserError: no such file, a line that is not JSON (named), or no line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; has the run started?") from None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{path}:{number}: not a JSON object; is the file damaged?")
        lines.append(value)
    if not lines:
        raise UserError(f"{path}: no step was logged yet")
    return lines


def curve(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The series `y` over `x`, averaged to at most `POINTS` points of equally many steps."""
    pairs = [(line[x], line[y]) for line in lines if x in line and y in line]
    pairs = [pair for pair in pairs if all(math.isfinite(number) for number in pair)]
    values = np.array(sorted(pairs), dtype=np.float64).reshape(-1, 2)
    parts = np.array_split(values, POINTS) if len(values) > POINTS else [values]
    if len(parts) > 1:
        values = np.stack([part.mean(axis=0) for part in parts])
    return values[:, 0], values[:, 1]


def training_curves(
    stages: Mapping[str, Mapping[str, Path]],
    pdf: Path,
    png: Path,
    x: str = "epoch",
    y: str = "loss",
) -> None:
    """Draw the loss of runs, one panel a stage (their losses are not comparable).

    Args:
        stages: panel title -> curve title -> `metrics.jsonl`.
        x: key of the horizontal axis in the lines.
        y: key of what is drawn.

    Raises:
        UserError: nothing to draw, or a file without these keys.
    """
    if not any(stages.values()):
        raise UserError("training curves: no run to draw")
    stages = {title: runs for title, runs in stages.items() if runs}
    with styled():
        figure, axes = panels(1, len(stages), height=2.5)
        for ax, (title, runs) in zip(axes, stages.items(), strict=True):
            for number, (name, path) in enumerate(runs.items()):
                horizontal, vertical = curve(read_metrics_lines(path), x, y)
                if not len(horizontal):
                    raise UserError(f"{path}: no line has both {x!r} and {y!r}")
                ax.plot(
                    horizontal, vertical, label=name,
                    color=COLORS[number % len(COLORS)], linestyle=LINES[number // len(COLORS) % 4],
                )  # fmt: skip
            ax.set_title(title)
            ax.set_xlabel(x)
            if len(runs) > 1:
                ax.legend()
            else:
                ax.set_title(f"{title}: {next(iter(runs))}")
        axes[0].set_ylabel(y)
        save(figure, pdf, png)
