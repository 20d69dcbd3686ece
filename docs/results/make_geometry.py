"""Makes the page on geometry: what a matrix gains, what tuning gains, and what both gain.

    python docs/results/make_geometry.py pixels  # once: k-NN and clusters of the digits' pixels
    python docs/results/make_geometry.py

It reads what `publish.py collect` wrote of the experiments, and the text in `geometry/found.md`.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from paired import (
    DATA,
    LOOKUP,
    MAE,
    NONE,
    STOPPED,
    VIEWS,
    Side,
    cell,
    corrected,
    filled,
    number_of_tests,
    published,
)
from PIL import Image

from maect.core.files import write_text
from maect.data.bundled import write_digits
from maect.evaluate.geometry import FeatureTask, corrections
from maect.report.figures import method_style, panels, save, styled

HERE = Path(__file__).parent
OUT = HERE / "geometry"
CORRECTIONS = {
    "raw": "as it is",
    "centred": "centred",
    "standardized": "standardised",
    "whitened_0": "whitened, 0",
    "whitened_0.01": "whitened, 0.01",
    "whitened_0.1": "whitened, 0.1",
    "without_1": "without 1",
    "without_2": "without 2",
    "without_4": "without 4",
    "without_8": "without 8",
}
MEASURES = {
    "knn": "k-NN",
    "low_shot_1": "1 label a class",
    "low_shot_5": "5 labels a class",
    "nmi": "clusters, NMI",
    "accuracy": "cluster accuracy",
}
PAIRED = ("knn", "low_shot_1", "accuracy", "nmi")
IN_TABLE = ("knn", "low_shot_1", "nmi")
MODELS = [(MAE, ""), *((kind, v) for v in VIEWS.values() for kind in (LOOKUP, STOPPED, NONE))]
SHOWN = ("0.01", "0.1")
"""Shrinkages that are tested and drawn; the first was named before anything was run."""


def values() -> list[dict[str, Any]]:
    """Mean and deviation over seeds, by data set, model, correction and measure."""
    rows = []
    for name, experiment in published(list(DATA), HERE):
        for model in MODELS:
            for correction in CORRECTIONS:
                for measure in MEASURES:
                    metric = f"{measure}_{correction}"
                    found = list(experiment.seeds(model, "geometry", metric).values())
                    if found:
                        about = {"data": DATA[name], "model": model[0], "views": model[1]}
                        about |= {"correction": correction, "measure": measure}
                        std = float(np.std(found, ddof=1)) if len(found) > 1 else None
                        line = {"value": float(np.mean(found)), "std": std, "seeds": len(found)}
                        rows.append(about | line)
    return rows


def differences() -> list[dict[str, Any]]:
    """Gains over the MAE as it is, and what is left between the ways; Holm's p per data set."""
    rows: list[dict[str, Any]] = []
    for name, experiment in published(list(DATA), HERE):
        found = []
        for shrinkage in SHOWN:
            for measure in PAIRED:
                raw, white = f"{measure}_raw", f"{measure}_whitened_{shrinkage}"
                asked = [("matrix", "", Side((MAE, ""), raw), Side((MAE, ""), white))]
                for views in VIEWS.values():
                    tuned = LOOKUP, views
                    asked += [
                        ("tuning", views, Side((MAE, ""), raw), Side(tuned, raw)),
                        ("both", views, Side((MAE, ""), raw), Side(tuned, white)),
                        ("matrix on tuned", views, Side(tuned, raw), Side(tuned, white)),
                        ("tuning on matrix", views, Side((MAE, ""), white), Side(tuned, white)),
                        ("matrix minus tuning", views, Side(tuned, raw), Side((MAE, ""), white)),
                    ]
                for comparison, views, first, second in asked:
                    row = experiment.compare(first, second, "geometry")
                    once = comparison == "tuning" and shrinkage != SHOWN[0]
                    if row and not once:
                        about = {"data": DATA[name], "comparison": comparison, "views": views}
                        about |= {"metric": f"{measure} {shrinkage}"}
                        found.append(about | row)
        rows += corrected(found)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """What MAE has, and what a matrix, tuning and both add, by measure."""
    heads = (
        "a matrix",
        "tuning, crops",
        "tuning, colours",
        "colours and matrix",
    )
    lines = [f"| | MAE | {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) + 1)}"]
    known = {(r["data"], r["comparison"], r["views"], r["metric"]): r for r in rows}
    raw = {
        (r["data"], r["measure"]): r
        for r in values()
        if r["model"] == MAE and r["correction"] == "raw"
    }
    for data in dict.fromkeys(row["data"] for row in rows):
        for measure in IN_TABLE:
            metric = f"{measure} {SHOWN[0]}"
            asked = [
                ("matrix", "", metric),
                ("tuning", "crops", metric),
                ("tuning", "colours", metric),
                ("both", "colours", metric),
            ]
            cells = [cell(known.get((data, *key))) for key in asked]
            mae = raw[data, measure]["value"]
            lines.append(f"| {data}: {MEASURES[measure]} | {mae:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


@styled()
def draw(rows: list[dict[str, Any]]) -> None:
    """Gain over the MAE as it is: by a matrix, by tuning, by both."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    measures = ("knn", "low_shot_1", "nmi")
    figure, axes = panels(len(data), len(measures), height=2.8)
    grid = np.array(axes, dtype=object).reshape(len(data), len(measures))
    known = {(r["data"], r["comparison"], r["views"], r["metric"]): r for r in rows}
    places = [
        ("matrix", "", "matrix"),
        ("tuning", "crops", "tuning,\ncrops"),
        ("both", "crops", "both,\ncrops"),
        ("tuning", "colours", "tuning,\ncolours"),
        ("both", "colours", "both,\ncolours"),
    ]
    for row, one in enumerate(data):
        for column, measure in enumerate(measures):
            ax = grid[row, column]
            for number, shrinkage in enumerate(SHOWN):
                style = method_style(number) | {"linestyle": "", "capsize": 3}
                mean, error = [], []
                for comparison, views, _ in places:
                    given = SHOWN[0] if comparison == "tuning" else shrinkage
                    gain = known.get((one, comparison, views, f"{measure} {given}"), {})
                    mean.append(gain.get("value", np.nan))
                    error.append(gain.get("std") or np.nan)
                at = np.arange(len(places)) + 0.16 * (number - 0.5)
                ax.errorbar(at, mean, error, **style, label=f"shrinkage {shrinkage}")
            ax.axhline(0, color="#777777", linewidth=0.7)
            ax.set_xticks(range(len(places)), [title for *_, title in places], fontsize=6)
            ax.set_title(f"{one}: {MEASURES[measure]}", fontsize=9)
            ax.set_xlim(-0.5, len(places) - 0.5)
        grid[row, 0].set_ylabel("gain over MAE (points)")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    save(figure, OUT / "gains.png")


def measure_pixels() -> None:
    """Measure the digits' own pixels behind every correction: what any encoder starts from."""
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        parts = []
        for split in ("train", "val"):
            files = sorted(Path(folder, split).glob("*/*.png"))
            grey = [np.asarray(Image.open(file).convert("L"), np.float32).ravel() for file in files]
            parts.append((np.stack(grey), np.array([int(file.parent.name) for file in files])))
    (train, labels), (test, wanted) = parts
    task = FeatureTask(labels, wanted, {})
    lines = []
    for correction, correct in corrections(train).items():
        found = task.measure(train, test, correct)
        scores = [one["nmi"] for one in found.clusters]
        line = {"correction": correction, "knn": 100 * float(found.right["knn"].mean())}
        lines.append(line | {"nmi": float(np.mean(scores))})
    write_text(OUT / "pixels.csv", pd.DataFrame(lines).to_csv(index=False, lineterminator="\n"))


def gain_in_law(run: str) -> float:
    """What a tuned encoder of `cifar10_law` has more than its MAE, k-NN as the features are."""
    table = pd.read_csv(HERE / "cifar10_law/measured.csv")
    knn = table[table["metric"] == "knn"].set_index("run")["value"]
    return float(knn[run] - knn["mae_tiny8"])


def page(rows: list[dict[str, Any]], every: list[dict[str, Any]]) -> str:
    """The page, from its text and the numbers."""
    text = (OUT / "found.md").read_text(encoding="utf-8")
    pixels = pd.read_csv(OUT / "pixels.csv", index_col="correction")
    for correction, line in pixels.iterrows():
        for measure, value in line.items():
            text = text.replace(f"{{pixels {measure} {correction}}}", f"{value:.1f}")
    for row in every:
        key = ", ".join(filter(None, (row["data"], row["model"], row["views"])))
        name = f"{{mean {key}, {row['correction']}, {row['measure']}}}"
        text = text.replace(name, f"{row['value']:.1f}")
    text = re.sub(r"\{law (\w+)\}", lambda match: f"{gain_in_law(match[1]):+.1f}", text)
    return filled(text, rows, table=table(rows), tests=number_of_tests(rows))


def main() -> None:
    """Measure pixels; or write numbers, figure and page."""
    if sys.argv[1:] == ["pixels"]:
        measure_pixels()
        return
    every, rows = values(), differences()
    for name, lines in (("values", every), ("differences", rows)):
        text = pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")
        write_text(OUT / f"{name}.csv", text)
    draw(rows)
    write_text(OUT / "README.md", page(rows, every))


if __name__ == "__main__":
    main()
