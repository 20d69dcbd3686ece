"""Draws `law.png`: what tuning adds to k-NN and clusters, against how often its lookup is right.

    python docs/results/make_law.py

It reads the CSV files and the configs of the published experiments, and nothing else. Of a data set
it shows the seeds that all of its lines have.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from maect.records import seedless
from maect.report.figures import method_style, panels, save, styled

HERE = Path(__file__).parent
DATA_SETS = {"digits_law": "digits", "cifar10_law": "CIFAR-10", "tiny_imagenet": "Tiny-ImageNet"}
COLUMNS = ["model", "seed", "views", "lookup", "right", "gain"]
GREY = "#555555"
MEASURES = {"knn_standardized": "k-NN", "nmi_mean": "NMI of clusters"}
VIEWS = {"min": "crops and flips (digits: crops)", "aug": "with colours"}


def tuned(folder: Path, metric: str) -> pd.DataFrame:
    """The tuned runs of a published experiment that have a metric beside that of their MAE.

    Only of the seeds that every model has: three seeds are not compared with one.

    Returns:
        `model` (without seed), `seed`, `views` and `lookup` of its config, `right` (percent of
        lookups of the right class, as drawn or as logged; 100 without lookup), `gain` (points).
    """
    runs = pd.read_csv(folder / "runs.csv", index_col="run", keep_default_na=False)
    measured = pd.read_csv(folder / "measured.csv")
    values = measured[measured["metric"] == metric].set_index("run")["value"]

    def lines() -> Iterator[dict[str, object]]:
        for run in runs.index[runs["stage"] == "tune"].intersection(values.index):
            first = run
            while runs.at[first, "from"]:
                first = runs.at[first, "from"]
            config = yaml.safe_load((folder / f"resolved/{run}.yaml").read_text(encoding="utf-8"))
            head = config["settings"]["head"]
            drawn = {"oracle": 100 * head["oracle_right"], "none": 100.0}
            yield {
                "model": seedless(run),
                "seed": runs.at[run, "seed"],
                "views": config["settings"]["augmentation"],
                "lookup": head["lookup"],
                "right": drawn.get(head["lookup"]) or float(str(runs.at[run, "lookups_right"])),
                "gain": values[run] - values[first],
            }

    found = pd.DataFrame(list(lines()), columns=COLUMNS)
    models = found.groupby("seed")["model"].nunique()
    return found[found["seed"].isin(models.index[models == found["model"].nunique()])]


def draw(axes: Sequence[Axes], metric: str) -> None:
    """Draw a row of panels, one for each kind of views."""
    for number, (name, title) in enumerate(DATA_SETS.items()):
        style = method_style(number) | {"linestyle": "-"}
        every = tuned(HERE / name, metric)
        if "none" not in set(every["lookup"]):
            continue  # nothing to compare a lookup with
        seeds = every["seed"].nunique()
        for ax, views in zip(axes, VIEWS, strict=True):
            own = every[every["views"] == views].groupby(["lookup", "model"])[["right", "gain"]]
            mean, std = own.mean(), own.std()
            if "oracle" in mean.index:
                oracle = mean.loc[["oracle"]].sort_values("right")
                ax.plot(oracle["right"], oracle["gain"], **style)
            if "topk" in mean.index:
                real, error = mean.loc[["topk"]], std.loc[["topk"]]
                hollow = {"linestyle": "", "fillstyle": "none", "markersize": 9, "capsize": 2}
                ax.errorbar(real["right"], real["gain"], error["gain"], **style | hollow)
            if "none" in mean.index:
                ax.axhline(mean.loc[["none"], "gain"].mean(), color=style["color"], linestyle=":")
            seed = f"{seeds} seed{'s'[: seeds > 1]}"
            ax.plot([], [], **style, label=f"{title} ({seed})")
    axes[0].set_ylabel(f"{MEASURES[metric]}: gain over MAE")
    for ax in axes:
        ax.axhline(0, color="#777777", linewidth=0.7)
        ax.set(xlim=(0, 104))
    lowest, highest = (f(ax.get_ylim()[i] for ax in axes) for i, f in enumerate((min, max)))
    for ax in axes:
        ax.set_ylim(lowest, highest)


@styled()
def main() -> None:
    """Draw the figure."""
    figure, axes = panels(len(MEASURES), len(VIEWS), height=2.8)
    rows = [axes[: len(VIEWS)], axes[len(VIEWS) :]]
    for row, metric in zip(rows, MEASURES, strict=True):
        draw(row, metric)
    for ax, title in zip(rows[0], VIEWS.values(), strict=True):
        ax.set_title(title)
    for ax in rows[-1]:
        ax.set_xlabel("lookups of the right class (%)")
    kinds = [
        Line2D([], [], color=GREY, label="drawn lookup"),
        Line2D([], [], color=GREY, marker="o", fillstyle="none", linestyle="", label="real lookup"),
        Line2D([], [], color=GREY, linestyle=":", label="no lookup"),
    ]
    handles = [*axes[0].get_legend_handles_labels()[0], *kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    save(figure, HERE / "law.png")


if __name__ == "__main__":
    main()
