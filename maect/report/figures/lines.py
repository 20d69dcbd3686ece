"""Accuracy against cost and labels, error by block (paper, figures 2, 3 and 5), training curves."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.records import entries, is_finished
from maect.report import tables
from maect.report.configs import Row, ShownConfig
from maect.report.figures import (
    COLORS,
    LINES,
    WIDTH,
    finished_runs,
    ink,
    method_style,
    panels,
    row_title,
    soft,
    stage_title,
    themed,
)
from maect.report.registry import FIGURES, TABLES, architecture_title, method_title
from maect.report.tables import KEYS, build_table, chain
from maect.stages import STAGES

LABELS = {
    "low_shot_1": "1 per class",
    "low_shot_2": "2 per class",
    "low_shot_5": "5 per class",
    "low_shot_1pct": "1 %",
    "low_shot_10pct": "10 %",
    "fine_tune": "100 %",
}
ONLINE = {
    "online_knn": ("online k-NN", "accuracy on training images (%)"),
    "online_rank_me": ("RankMe", "effective rank"),
    "online_uniformity": ("uniformity", "uniformity"),
    "online_alignment": ("alignment", "alignment"),
}
"""Panel and unit of each value of an online evaluation."""
BY_BLOCK = {
    "color_histogram": ("errors", "histogram prediction error (%)"),
    "knn_per_block": ("knn_standardized", "k-NN accuracy (%)"),
}
"""Metric and unit of each figure by block."""
LETTERS = 13  # an inch of a title, at its size
POINTS = 200  # more than a page shows: longer curves are averaged down to this
# Whatever is beside the line is the paper's, whatever is filled was measured.
ALONE: dict[str, Any] = {"linestyle": ""}
PRINTED = ALONE | {"fillstyle": "none"}


def explained(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend that belongs to no model."""
    return Line2D([], [], color=soft(), label=label, **style)


def points_of(table: pd.DataFrame, cost: pd.DataFrame) -> pd.DataFrame:
    """Return models whose probing accuracy (table `gpu_hours`) and cost are known.

    Returns:
        A line a model, with `architecture`, `method`, `hours` (by the benchmark, or as recorded
        where there is none), `recorded`, `accuracy`, `std`, `paper`, and `drawn`, the accuracy
        where it is written: measured, else the paper's. NaN where something is not known.
    """
    both = table.merge(cost[[*KEYS, "hours"]].rename(columns={"hours": "recorded"}), "left", KEYS)
    both["hours"] = both["hours"].fillna(both["recorded"])
    names = {"": "accuracy", "_std": "std", "_paper": "paper"}
    both = both.rename(columns={f"linear_probe{end}": name for end, name in names.items()})
    both["drawn"] = both["accuracy"].fillna(both["paper"])
    return both.dropna(subset=["hours", "drawn"])


def gpu_hours(shown: ShownConfig) -> Figure:
    """Draw linear probing accuracy against device hours (log scale), one line a method."""
    asked = shown.rows, shown.evaluations, shown.compare_with_paper
    points = points_of(build_table("gpu_hours", *asked), tables.cost_table(shown.rows, shown.runs))
    if points.empty:
        raise UserError("gpu_hours figure: no run has both a linear probe and a known cost")
    known = points.dropna(subset=["recorded"])
    timed = not all(map(math.isclose, known["hours"], known["recorded"]))
    few = points["method"].nunique() <= 4
    figure, (ax,) = panels(1, 1, height=3.2 if few else 3.8)
    for number, (method, of_it) in enumerate(points.groupby("method", sort=False)):
        line = of_it.sort_values("hours", kind="stable")
        style = method_style(number)
        look = style | {"capsize": 2, "label": method_title(str(method))}
        ax.errorbar(line["hours"], line["accuracy"], line["std"].fillna(0), **look)
        ax.plot(line["hours"], line["paper"], **style | PRINTED)
        if timed:
            ax.plot(line["recorded"], line["accuracy"], **style | ALONE | {"marker": "+"})
        for p in line.itertuples():
            ax.annotate(
                architecture_title(str(p.architecture)), (p.hours, p.drawn),
                xytext=(5, -9 if number % 2 else 5), textcoords="offset points",
                fontsize=6.5 if few else 5.5, color=ink(),
            )  # fmt: skip
    ax.set(xscale="log", xlabel="device hours of training", ylabel="linear probing accuracy (%)")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.12, y=0.1)
    handles, _ = ax.get_legend_handles_labels()
    if points["paper"].notna().any():
        handles.append(explained("paper", marker="o", **PRINTED))
    if timed:
        handles.append(explained("hours by a short benchmark", marker="o", **ALONE))
        handles.append(explained("hours as recorded", marker="+", **ALONE))
    if few:
        ax.legend(handles=handles, loc="best")
    else:
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def knn_compute(shown: ShownConfig) -> Figure:
    """Draw k-NN accuracy against operations: of finished models, and while they trained."""
    frame = build_table("low_shot", shown.rows, shown.evaluations)[[*KEYS, "knn", "knn_std"]]
    known = {line[:2]: line[2:] for line in frame.itertuples(index=False, name=None)}
    figure, (ax,) = panels(1, 1, height=3.2)
    drawn = set[str]()
    online = False
    for number, row in enumerate(shown.rows):
        done = [run for run in row.runs if is_finished(shown.runs / run)]
        accuracy, std = known[row.architecture, row.method]
        if not done or math.isnan(accuracy):
            continue
        style = method_style(number)
        before = 0.0
        line = list[tuple[float, float]]()
        for record in reversed(chain(done[0], shown.runs)):
            path = shown.runs / record.run / "metrics.jsonl"
            steps = entries(path, sha256=record.log_sha256)
            if not steps:
                raise UserError(f"{path}: no step was logged")
            flops = tables.flops_of_step(record) / 1e15
            found = [
                (before + flops * s["step"], s["online_knn"]) for s in steps if "online_knn" in s
            ]
            # A line begins where that of the model before it ends.
            line = (found or line)[-1:] if record.run in drawn else [*line, *found]
            drawn.add(record.run)
            before += flops * steps[-1]["step"]
        if line:
            online = True
            marker = "." if len(line) == 1 else ""
            ax.plot(*zip(*line, strict=True), color=style["color"], linewidth=0.9, marker=marker)
        std = np.nan_to_num(std)
        name = row_title(row, shown.rows)
        ax.errorbar([before], [accuracy], [std], **style | ALONE, capsize=2, label=name)
    if not drawn:
        raise UserError("knn_compute figure: no run has both a k-NN and a completion record")
    ax.set(xlabel="operations of training (10$^{15}$)", ylabel="k-NN accuracy (%)")
    ax.set_xlim(left=0)
    handles, _ = ax.get_legend_handles_labels()
    if online:
        handles.append(explained("finished, on test images", marker="o", **ALONE))
        handles.append(explained("while training, on training images", linewidth=0.9))
    ax.legend(handles=handles, loc="best")
    return figure


def gain_by_precision(shown: ShownConfig) -> Figure:
    """Draw the k-NN accuracy that tuning adds against the precision of its lookups."""
    figure, (ax,) = panels(1, 1, height=3.2)
    lines = dict[str, list[tuple[float, float, float]]]()
    points = list[tuple[str, str, tuple[float, float, float]]]()
    for row in shown.rows:
        gains = [_gain(shown, run) for run in row.runs]
        found = [one for one in gains if one is not None]
        if not found:
            continue
        augmentation, lookup = found[0][:2]
        right, gained = np.array([one[2:] for one in found]).T
        std = float(gained.std(ddof=1)) if len(gained) > 1 else 0.0
        point = float(right.mean()), float(gained.mean()), std
        if lookup == "oracle":
            lines.setdefault(augmentation, []).append(point)
        else:
            points.append((augmentation, lookup, point))
    if not lines and not points:
        raise UserError("gain_by_precision figure: no tuned run has a k-NN beside that of its MAE")
    order = list(dict.fromkeys([*lines, *(one for one, _, _ in points)]))
    for augmentation, line in lines.items():
        x, y, error = zip(*sorted(line), strict=True)
        style = method_style(order.index(augmentation)) | {"linestyle": "-", "capsize": 2}
        ax.errorbar(x, y, error, **style, label=f"{augmentation}, oracle")
    for augmentation, lookup, (part, gain, std) in points:
        style = method_style(order.index(augmentation)) | PRINTED
        if lookup == "none":  # the other view, which is right but no neighbour
            look = {"color": style["color"], "linestyle": ":", "linewidth": 0.9}
            ax.axhline(gain, **look, label=f"{augmentation}, no lookup")
            continue
        style |= {"markersize": 8, "capsize": 2}
        ax.errorbar([part], [gain], [std], **style, label=f"{augmentation}, lookup")
    ax.axhline(0, color=soft(), linewidth=0.7)
    ax.set(xlabel="lookups of the right class (%)", ylabel="k-NN, gain over MAE (points)")
    ax.legend()
    return figure


def _gain(shown: ShownConfig, run: str) -> tuple[str, str, float, float] | None:
    """Return augmentation, lookup, percent of right lookups and points of k-NN gained.

    None of a run that is not tuned with neighbours, or that has no k-NN or whose MAE has none.
    """
    if not is_finished(shown.runs / run):
        return None
    records = chain(run, shown.runs)
    head = records[0].settings.get("head") or {}
    results = [
        tables.result_of(shown.evaluations, name, ("knn",), "knn_standardized")
        for name in (run, records[-1].run)
    ]
    if records[0].stage != "tune" or len(records) == 1 or None in results:
        return None
    tuned, before = (
        float(tables.read_metrics(path)["knn_standardized"]) for path in results if path is not None
    )
    steps = entries(shown.runs / run / "metrics.jsonl", sha256=records[0].log_sha256)
    right = [step["lookup_accuracy"] for step in steps if "lookup_accuracy" in step]
    if head["lookup"] != "none" and not right:
        return None
    part = float(np.mean(right)) if right else 100.0
    return records[0].settings["augmentation"], head["lookup"], part, tuned - before


def label_efficiency(shown: ShownConfig) -> Figure:
    """Draw accuracy against the number of labels, a panel an architecture, a colour a method.

    A line joins the numbers of one protocol.
    """
    asked = shown.rows, shown.evaluations, shown.compare_with_paper
    low_shot, fine_tune = build_table("low_shot", *asked), build_table("fine_tune", *asked)
    wanted = [c for c in fine_tune.columns if c.startswith("fine_tune")]
    both = pd.concat([low_shot, fine_tune[KEYS + wanted]])
    frame = both.groupby(KEYS, sort=False).first().reset_index()
    counts = _label_counts(shown, [name for name in LABELS if frame[name].notna().any()])
    names = sorted(counts, key=lambda name: counts[name])
    frame = frame[frame[names].notna().any(axis=1)] if names else frame.iloc[:0]
    if frame.empty:
        raise UserError(
            "label_efficiency figure: no evaluation with a known number of labels; evaluate "
            "low_shot or fine_tune"
        )
    sizes = list(dict.fromkeys(frame["architecture"]))
    methods = list(dict.fromkeys(frame["method"]))
    rows = {(row.architecture, row.method): row for row in shown.rows}
    figure, axes = panels(1, len(sizes), height=2.9)
    kinds = set[bool]()
    for ax, size in zip(axes, sizes, strict=True):
        for _, line in frame[frame["architecture"] == size].iterrows():
            style = method_style(methods.index(line["method"]))
            row = rows[size, line["method"]]
            parts: dict[bool, list[str]] = {}
            for name in names:
                if not math.isnan(line[name]):
                    is_fine_tuned = _result(shown, row, name)[0].startswith("fine_tune")
                    parts.setdefault(is_fine_tuned, []).append(name)
            for is_fine_tuned, part in parts.items():
                kinds.add(is_fine_tuned)
                look = style | {"linestyle": "--" if is_fine_tuned else "-"}
                spread = np.nan_to_num([line[f"{name}_std"] for name in part])
                x, y = [counts[name] for name in part], [line[name] for name in part]
                ax.errorbar(x, y, spread, **look, capsize=2, markersize=4)
            papers = [line[f"{n}_paper"] for n in names]
            ax.plot([counts[name] for name in names], papers, **style | PRINTED, markersize=6)
        ax.set_title(architecture_title(size))
        ax.set(xscale="log", xlabel="number of labels")
        ticks = {
            count: " = ".join(LABELS[n] for n in names if counts[n] == count)
            for count in counts.values()
        }
        ax.set_xticks(
            [*ticks], [f"{n:,} ({of})" for n, of in ticks.items()], rotation=40, ha="right"
        )
        ax.minorticks_off()
    axes[0].set_ylabel("accuracy (%)")
    handles = [
        Line2D([], [], **method_style(number) | {"linestyle": ""}, label=method_title(method))
        for number, method in enumerate(methods)
    ]
    handles += [
        explained(title, linestyle="--" if is_fine_tuned else "-")
        for is_fine_tuned, title in ((False, "logistic regression"), (True, "fine-tuning"))
        if is_fine_tuned in kinds
    ]
    if frame[[f"{name}_paper" for name in names]].notna().any(axis=None):
        handles.append(explained("paper", marker="o", **PRINTED))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def _result(shown: ShownConfig, row: Row, name: str) -> tuple[str, Path | None]:
    """Return the evaluation that gives a number of a model, and its result if there is one."""
    table = TABLES["fine_tune" if name == "fine_tune" else "low_shot"]
    metric = next(metric for metric in table.metrics if metric.name == name)
    asked = table.evaluations_of(metric, row.method)
    for one, run in itertools.product(asked, row.runs):
        path = tables.result_of(shown.evaluations, run, (one,), metric.source)
        if path:
            return one, path
    return asked[0], None


def _label_counts(shown: ShownConfig, names: Sequence[str]) -> dict[str, float]:
    """Return the number of labels behind each number, as a result or the training split says it."""
    split = seek_record(shown.classes) if shown.classes else {}
    images, classes = split.get("n"), len(split.get("class_names", ()))
    counts: dict[str, float] = {}
    for name in names:
        found = (_result(shown, row, name)[1] for row in shown.rows)
        subsets = (tables.labels_behind(path, name) for path in found if path)
        _, _, part = name.rpartition("_")
        if recorded := next(filter(None, subsets), None):
            counts[name] = recorded
        elif part.isdecimal() and classes:
            counts[name] = int(part) * classes
        elif not part.isdecimal() and images:
            fraction = int(part.removesuffix("pct")) / 100 if part.endswith("pct") else 1
            counts[name] = round(fraction * images)
    return counts


def by_block(shown: ShownConfig) -> Figure:
    """Draw a value after each block, one line a model: mean and deviation over its runs.

    Reads the evaluation of the figure's name, whose metric (`BY_BLOCK`) is a list, one value a
    block from the first to the last.
    """
    key, label = BY_BLOCK[shown.name]
    figure, (ax,) = panels(1, 1, height=2.9)
    most = 0
    for number, row in enumerate(shown.rows):
        lines = list[list[float]]()
        runs = row.runs[:1] if FIGURES[shown.name].first_seed else row.runs
        paths = (tables.result_file(shown.evaluations, run, shown.name) for run in runs)
        for path in filter(None, paths):
            found = tables.read_metrics(path).get(key)
            if not isinstance(found, list) or not found or len(found) != len([*lines, found][0]):
                raise UserError(
                    f"{path}: `{key}` is no list with a value for each block; "
                    f"evaluate {shown.name} again"
                )
            lines.append(found)
        if not lines:
            continue
        blocks = len(lines[0])
        most = max(most, blocks)
        style = method_style(number) | {"capsize": 2, "markersize": 3}
        spread = np.std(lines, axis=0, ddof=1) if len(lines) > 1 else None
        x = range(1, blocks + 1)
        title = row_title(row, shown.rows)
        ax.errorbar(x, np.mean(lines, axis=0), spread, **style, label=title)
    if not most:
        raise UserError(f"{shown.name} figure: no run has this evaluation")
    ax.set(xlabel="block", ylabel=label, xlim=(0.5, most + 0.5))
    ax.set_xticks(range(1, most + 1, 1 if most <= 12 else 2))  # every other one of many
    ax.legend()
    return figure


def curve(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the series `y` over `x`, averaged to at most `POINTS` points."""
    pairs = [(line[x], line[y]) for line in lines if x in line and y in line]
    pairs = [pair for pair in pairs if all(math.isfinite(number) for number in pair)]
    values = np.array(sorted(pairs), dtype=np.float64).reshape(-1, 2)
    if len(values) > POINTS:
        values = np.stack([part.mean(axis=0) for part in np.array_split(values, POINTS)])
    return values[:, 0], values[:, 1]


def shortened(name: str, letters: int) -> str:
    """Shorten a name in its middle: names of runs differ at their ends."""
    if len(name) <= letters:
        return name
    end = (letters - 1) // 2
    return f"{name[: letters - 1 - end]}…{name[-end:]}"


def training_curves(shown: ShownConfig) -> Figure:
    """Draw the loss over epochs of every run behind the rows, one panel a stage.

    Losses of different stages are not comparable. Where a pre-training has two, MAE's is beside
    that of others, and NNCLR's has a panel of its own. So has what was found where encoders were
    evaluated while they trained: k-NN accuracy on training images, RankMe, uniformity, alignment.
    """
    drawn: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {
        stage_title(stage): {} for stage in STAGES
    }
    units: dict[str, str] = {}
    for node in finished_runs(shown):
        path = shown.runs / node.run / "metrics.jsonl"
        lines = entries(path, sha256=node.log_sha256)
        title = stage_title(node.stage)
        parts = curve(lines, "epoch", "loss_mae")
        line = parts if len(parts[0]) else curve(lines, "epoch", "loss")
        if lines and not len(line[0]):
            raise UserError(f"{path}: no line has both 'epoch' and 'loss'")
        if lines:
            drawn.setdefault(title, {})[node.run] = line
        if len(parts[0]):
            nnclr = drawn.setdefault(f"{title}, NNCLR", {})
            nnclr[node.run] = curve(lines, "epoch", "loss_nnclr")
        if not STAGES[node.stage].trains_encoder:
            continue
        for key, (what, unit) in ONLINE.items():
            evaluated = curve(lines, "epoch", key)
            if len(evaluated[0]):
                units[f"{title}, {what}"] = unit
                drawn.setdefault(f"{title}, {what}", {})[node.run] = evaluated
    drawn = {title: runs for title, runs in drawn.items() if runs}
    if not drawn:
        raise UserError("training curves: no run to draw")
    columns = min(len(drawn), 3)
    figure, axes = panels(-(-len(drawn) // columns), columns, height=2.5)
    letters = int(LETTERS * WIDTH / columns)
    for ax in axes[len(drawn) :]:
        ax.remove()
    for position, (ax, (title, runs)) in enumerate(zip(axes, drawn.items(), strict=False)):
        for number, (name, (horizontal, vertical)) in enumerate(runs.items()):
            color = themed(COLORS[number % len(COLORS)])
            dashes = LINES[number // len(COLORS) % 4]
            marker = "o" if len(horizontal) == 1 else ""
            label = shortened(name, letters)
            ax.plot(horizontal, vertical, label=label, color=color, linestyle=dashes, marker=marker)
        words = textwrap.wrap(title, letters - 5)  # panels are narrower than their part
        ax.set_xlabel("epoch")
        if len(runs) > 1:
            ax.legend()
        else:
            words.append(shortened(next(iter(runs)), letters))
        ax.set_title("\n".join(words))
        if title in units:
            ax.set_ylabel(units[title])
        elif position % columns == 0:
            ax.set_ylabel("loss")
    return figure
