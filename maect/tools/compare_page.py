"""The results of `maect compare` as a table of numbers, as Markdown and as a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from maect.core.errors import counted
from maect.core.files import write_table_text, write_text
from maect.evaluate.outcomes import accuracy_intervals, intervals
from maect.report.render import INTERVALS, matrices, render_page
from maect.tools.compare import (
    GEOMETRY,
    KNN_HELD_OUT,
    LABEL_SETS,
    LOGISTIC,
    MEASURES,
    RANK_ME,
    WITHOUT_LABELS,
    Matrix,
)

COLUMNS = (
    "encoder", "folder", "measure", "value", "low", "high", "deviation", "chosen", "difference",
    "difference_low", "difference_high", "best", "classes", "train_images", "test_images",
)  # fmt: skip


def frame_of(matrix: Matrix) -> pd.DataFrame:
    """Return one row for each encoder, folder and measure, with the columns `COLUMNS`.

    `low` and `high` are ends of the 95 % interval, `deviation` that over label sets. `difference`
    is to the first encoder on the same test images. `best` is true of the encoder of the highest
    value and of those whose paired difference to it may be 0.
    """
    rows: list[dict[str, Any]] = []
    for folder in matrix.folders:
        train, test = matrix.readable[folder.name]
        for measure in MEASURES | GEOMETRY:
            found = {
                name: matrix.scores[name, folder.name][measure]
                for name in matrix.encoders
                if measure in matrix.scores[name, folder.name]
            }
            if not found:
                continue
            about = {"folder": folder.name, "measure": measure, "classes": folder.classes}
            about |= {"train_images": train, "test_images": test}
            if measure in WITHOUT_LABELS:
                for name, score in found.items():
                    rows.append({**about, "encoder": name, "value": score.value})
                continue
            columns = np.stack([score.per_image for score in found.values()], axis=1)
            best = columns[:, [int(columns.mean(axis=0).argmax())]]
            low, high = accuracy_intervals(columns)
            difference_low, difference_high = intervals(columns - columns[:, :1])
            below_best, _ = intervals(best - columns)
            for number, (name, score) in enumerate(found.items()):
                row = {
                    **about,
                    "test_images": len(columns),  # by ReaL's labels fewer
                    "encoder": name,
                    "value": score.value,
                    "low": low[number],
                    "high": high[number],
                    "deviation": score.deviation,
                    "chosen": score.chosen,
                    "best": bool(below_best[number] <= 0),
                }
                if number > 0:
                    row["difference"] = score.value - columns[:, 0].mean()
                    row["difference_low"] = difference_low[number]
                    row["difference_high"] = difference_high[number]
                rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _cell(line: Any) -> dict[str, Any]:
    """Return a cell: its value, interval, deviation, and the chosen setting."""
    if line.measure in WITHOUT_LABELS:
        digits = 1 if line.measure == WITHOUT_LABELS[0] else 3
        return {"value": f"{line.value:.{digits}f}", "more": "", "best": False}
    more = [f"{line.low:.1f} to {line.high:.1f}"]
    if pd.notna(line.deviation):
        more.append(f"± {line.deviation:.1f} over label sets")
    if line.chosen:
        more.append(line.chosen)
    return {"value": f"{line.value:.1f}", "more": "; ".join(more), "best": bool(line.best)}


def write_comparison(matrix: Matrix, out: Path, said: Sequence[str] = ()) -> pd.DataFrame:
    """Write `compare.csv`, `compare.md` and `index.html`, and return the numbers.

    Args:
        said: lines for people, after the notes.
    """
    frame = frame_of(matrix)
    write_table_text(out / "compare.csv", frame.to_csv(index=False, lineterminator="\n"))
    shown = matrices(frame, MEASURES | GEOMETRY, "folder", _cell)
    found = results(frame)
    write_text(
        out / "compare.md", render_page("matrix.md", tables=shown, notes=[*found, *said, *notes()])
    )
    folders = [
        {
            "name": folder.name,
            "train": f"{matrix.readable[folder.name][0]:,}",
            "test": f"{matrix.readable[folder.name][1]:,}",
            "classes": folder.classes or "",
            "left_out": len(folder.contents) - sum(matrix.readable[folder.name]),
            "remarks": ". ".join(folder.remarks),
        }
        for folder in matrix.folders
    ]
    encoders = [
        {"name": name, **encoder.about, "width": encoder.width}
        for name, encoder in matrix.encoders.items()
    ]
    page = render_page(
        "compare.html",
        title=f"{counted(len(encoders), 'encoder')} on {counted(len(folders), 'folder')}",
        results=[*found, *said],
        notes=notes(),
        tables=shown,
        folders=folders,
        encoders=encoders,
    )
    write_text(out / "index.html", page)
    return frame


def results(frame: pd.DataFrame) -> list[str]:
    """Return a sentence for each folder with classes: the best encoder by k-NN, and its equals."""
    found = []
    for folder, part in frame[frame["measure"] == KNN_HELD_OUT].groupby("folder", sort=False):
        line = part.sort_values("value").iloc[-1]
        best = part.loc[part["best"].astype(bool), "encoder"]
        equal = [name for name in best if name != line["encoder"]]
        text = (
            f"On {folder}, {line['encoder']} has the highest k-NN accuracy, {line['value']:.1f} % "
            f"({line['low']:.1f} to {line['high']:.1f}; k and T chosen on training images)"
        )
        if equal:
            text += f"; not distinguishable from it: {', '.join(equal)}"
        elif len(part) > 1:
            text += "; all others are significantly lower"
        found.append(f"{text}.")
    return found


def notes() -> list[str]:
    """Return remarks on the numbers, a sentence each."""
    return [
        f"Accuracies in percent. {INTERVALS}",
        "Bold: the best encoder of a column, and those whose paired difference to it may be 0.",
        f"Few labels: mean of {LABEL_SETS} drawn label sets, ± their standard deviation.",
        "A number chosen on the test images is too high; the one chosen on held-out training "
        "images stands beside it.",
        "RankMe and uniformity are no accuracies, and compare encoders of one width only.",
    ]


def summary(frame: pd.DataFrame) -> str:
    """Return k-NN and logistic regression as lines to print; of folders without labels RankMe."""
    lines = []
    for folder, part in frame.groupby("folder", sort=False):
        own = part["measure"]
        wanted = [KNN_HELD_OUT, LOGISTIC] if own.isin([LOGISTIC]).any() else [RANK_ME]
        values = part.pivot(index="encoder", columns="measure", values="value")[wanted]
        for encoder in dict.fromkeys(part["encoder"]):
            numbers = "  ".join(f"{name} {values.loc[encoder, name]:5.1f}" for name in wanted)
            lines.append(f"{folder}: {encoder}: {numbers}")
    return "\n".join(lines)
