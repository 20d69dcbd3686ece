"""Draws `law.png`: what tuning adds, against how often its lookup is right, on three data sets.

    python docs/results/make_law.py

It reads the CSV files and the configs of the published experiments, and nothing else.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml
from matplotlib.lines import Line2D

from maect.core.seeds import seedless
from maect.report.figures import method_style, panels, save

HERE = Path(__file__).parent
DATA_SETS = {"digits_law": "digits", "cifar10_law": "CIFAR-10", "tiny_imagenet": "Tiny-ImageNet"}
GREY = "#555555"
VIEWS = {"min": "crops and flips (digits: crops)", "aug": "with colours"}


def tuned(folder: Path) -> pd.DataFrame:
    """The tuned runs of a published experiment that have a k-NN beside that of their MAE.

    Returns:
        `model` (without seed), `views` and `lookup` of its config, `right` (percent of lookups of
        the right class, as drawn or as logged; 100 without lookup), `gain` (points of k-NN on
        standardised features).
    """
    runs = pd.read_csv(folder / "runs.csv", index_col="run", keep_default_na=False)
    measured = pd.read_csv(folder / "measured.csv")
    knn = measured[measured["metric"] == "knn_standardized"].set_index("run")["value"]

    def lines() -> Iterator[dict[str, object]]:
        for run in runs.index[runs["stage"] == "tune"].intersection(knn.index):
            first = run
            while runs.at[first, "from"]:
                first = runs.at[first, "from"]
            config = yaml.safe_load((folder / f"resolved/{run}.yaml").read_text(encoding="utf-8"))
            head = config["settings"]["head"]
            drawn = {"oracle": 100 * head["oracle_right"], "none": 100.0}
            yield {
                "model": seedless(run),
                "views": config["settings"]["augmentation"],
                "lookup": head["lookup"],
                "right": drawn.get(head["lookup"]) or float(str(runs.at[run, "lookups_right"])),
                "gain": knn[run] - knn[first],
            }

    return pd.DataFrame(lines())


def main() -> None:
    """Draw the figure."""
    figure, axes = panels(1, len(VIEWS), height=3.4)
    for number, (name, title) in enumerate(DATA_SETS.items()):
        style = method_style(number) | {"linestyle": "-"}
        every = tuned(HERE / name)
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
            ax.plot([], [], **style, label=title)
    for ax, title in zip(axes, VIEWS.values(), strict=True):
        ax.axhline(0, color="#777777", linewidth=0.7)
        ax.set(title=title, xlabel="lookups of the right class (%)", xlim=(0, 104))
    highest = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(-0.5, highest)
    axes[0].set_ylabel("k-NN on standardised features,\ngain over MAE (points)")
    kinds = [
        Line2D([], [], color=GREY, label="drawn lookup"),
        Line2D([], [], color=GREY, marker="o", fillstyle="none", linestyle="", label="real lookup"),
        Line2D([], [], color=GREY, linestyle=":", label="no lookup"),
    ]
    handles = [*axes[0].get_legend_handles_labels()[0], *kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    save(figure, HERE / "law.pdf", HERE / "law.png")
    (HERE / "law.pdf").unlink()


if __name__ == "__main__":
    main()
