"""Publishes an experiment: its numbers as CSV files, and a page that is made of these alone.

    python docs/results/publish.py collect cifar10    # from results/cifar10, beside this file
    python docs/results/publish.py page cifar10       # README.md and recipes.md, from these

`collect` takes what there is, beside what was published before: an experiment may be computed in
several sittings, on several machines, and the page of an unfinished one says so. Once the tables
of the main models are there it has a headline, which also goes into the project's README between
two comments of its name.
"""

import argparse
import contextlib
import copy
import math
import platform
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from merge import LOOKS, Here, Published, checksum, counts, flat, left, merge, result_file, weights
from PIL import Image

from maect.core.errors import UserError
from maect.core.files import json_lines, read_json, read_mapping, write_json, write_text
from maect.experiment import Experiment, load
from maect.experiment.resolve import (
    claims_config,
    evaluation_config,
    figures,
    read_by_shown,
    run_config,
    shown_config,
    tables,
)
from maect.report.claims import COST, claims_table, tables_of_runs, write_claims
from maect.report.configs import Row
from maect.report.figures import draw
from maect.report.registry import FIGURES, TABLES
from maect.report.render import MISSING, printed, render, verdicts
from maect.report.tables import build_table, pretraining_table, read_table, write_table
from maect.report.titles import method_title

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PILOTS = "pilots.yaml"
OF_NUMBERS = ("gpu_hours", "label_efficiency", "color_histogram", "knn_compute")
"""Figures that need nothing but numbers."""
HEADLINE = ("low_shot_1", "low_shot_2", "low_shot_5", "linear_probe", "knn")


# --- Results to CSV -------------------------------------------------------------------------------


def collect(name: str) -> None:
    """Copy and list all that there is: what was published and is not on this machine stays."""
    experiment, out = load(name), HERE / name
    here = Here(experiment)
    published = counts(here, out)
    for one in published.refuted:
        print(f"{one}: not what was published, or not of it: left out", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        merged = copy.copy(experiment)
        merged.root = Path(folder)
        merge(here, published, merged.root)
        results = {pair: result_file(merged, pair) for pair in experiment.evaluations}
        done = {pair: path for pair, path in results.items() if path.exists()}
        runs = _runs(here, published)
        _write(runs, out / "runs.csv")
        columns = ["run", "step", "epoch", "loss", *LOOKS, "lookup_accuracy"]
        _write(_curves(merged, published), out / "curves.csv", columns)
        _write(_measured(done), out / "measured.csv", ["run", "evaluation", "metric", "value"])
        missing = _tables(merged, pd.DataFrame(runs), out)
        shown = _figures(here, merged, published.shown, out)
        for figure in figures(experiment):
            if set(shown.get(figure, ())) != set(_read(experiment, figure)):
                missing.append(f"{figure}.png")
        write_json(out / "figures.json", shown)
        known = published.results | {
            "/".join(pair): {
                "settings": evaluation_config(experiment, *pair).digest,
                "left": left(result),
            }
            for pair, result in here.results.items()
        }
        counted = {"asked": len(results), "made": len(done), "missing": missing}
        write_json(out / "evaluations.json", counted | {"results": known})
    write_json(out / "images.json", read_mapping(out / "images.json") | _images(experiment))
    shutil.rmtree(out / "resolved", ignore_errors=True)
    for run in [*published.resolved, *here.runs]:
        told = published.resolved.get(run)
        told = told or run_config(experiment, run).text(experiment.folder(run) / "config.yaml")
        write_text(out / "resolved" / f"{run}.yaml", told)
    if (out / PILOTS).exists() and load(str(out / PILOTS)).root.exists():
        _write(_pilots(load(str(out / PILOTS))), out / "recipes.csv")


def _tables(merged: Experiment, runs: pd.DataFrame, out: Path) -> list[str]:
    """Make every table with a number, and the claims of these; returns what is not complete."""
    shutil.rmtree(out / "tables", ignore_errors=True)
    made, missing = {}, []
    for name in tables(merged):
        shown = shown_config(merged, name, figure=False)
        asked = shown.rows, shown.evaluations, shown.compare_with_paper, shown.runs
        made[name] = build_table(name, *asked)
        numbers = made[name].select_dtypes(float).filter(regex="(?<!_std)(?<!_paper)$")
        if numbers.notna().any(axis=None) and _can_tell(merged, name):
            write_table(made[name], out / "tables" / f"{name}.csv")
        if not all(path.exists() for path in read_by_shown(merged, name, figure=False)):
            missing.append(f"{name}.csv")
    if merged.spec.compare_with_paper:
        told = claims_config(merged)
        made |= tables_of_runs(told.rows, told.runs)
        made[COST] = _cost(told.rows, runs)
        write_claims(claims_table(made), out / "claims.csv")
    return missing


def _cost(rows: list[Row], runs: pd.DataFrame) -> pd.DataFrame:
    """What training costs, by operations: hours are of several machines, which others shared."""
    lines = []
    for row in rows:
        total = _operations_behind(row.runs, runs)
        first = _operations_behind(row.runs, runs, only_first=True)
        overhead = 100 * (total - first) / first if total > first else math.nan
        line = {"architecture": row.architecture, "method": row.method, "overhead": overhead}
        lines.append(line | {"overhead_std": math.nan})
    return pd.DataFrame(lines)


def _figures(
    here: Here, merged: Experiment, before: dict[str, list[str]], out: Path
) -> dict[str, list[str]]:
    """Draw figures of numbers, take those of images; returns the runs and results each shows.

    One of images stays as it was published until this machine has all that it shows.
    """
    (out / "figures").mkdir(exist_ok=True)
    shown, known = {}, {*here.runs, *map("/".join, here.results)}
    for name in figures(merged):
        to, read = out / "figures" / f"{name}.png", _read(here.experiment, name)
        made = here.experiment.root / "figures" / to.name
        if name in OF_NUMBERS:
            if not _can_tell(merged, name):
                continue
            with contextlib.suppress(UserError), tempfile.TemporaryDirectory() as folder:
                new = Path(folder, to.name)
                draw(shown_config(merged, name, figure=True), new.with_suffix(".pdf"), new)
                _copy(new, out / "figures")
                shown[name] = [one for one, path in _read(merged, name).items() if path.exists()]
        elif _is_newest(made, list(read.values())) and (name not in before or known >= read.keys()):
            _copy(made, out / "figures")
            shown[name] = [one for one in read if one in known]
        elif name in before and to.exists():
            shown[name] = before[name]
    for path in (out / "figures").iterdir():
        if path.stem not in shown:
            path.unlink()
    return shown


def _read(experiment: Experiment, figure: str) -> dict[str, Path]:
    """The records and results that a figure reads, by run and by `RUN/EVALUATION`."""
    found = {}
    for path in read_by_shown(experiment, figure, figure=True):
        if path.name == "run.json":
            found[path.parent.name] = path
        elif experiment.root / "evaluations" in path.parents:
            found[f"{path.parent.name}/{path.stem}"] = path
    return found


def _can_tell(merged: Experiment, name: str) -> bool:
    """Whether a table or figure of cost has a measurement: recorded hours were disturbed."""
    told = FIGURES[name].unless if name in FIGURES else ""
    return not told or any(
        result_file(merged, (run, told)).exists() for row in merged.rows(name) for run in row.runs
    )


def _copy(path: Path, folder: Path) -> None:
    """Copy a file; a large figure, which is one of photographs, in 256 colours."""
    if path.suffix != ".png" or path.stat().st_size < 2**20:
        shutil.copyfile(path, folder / path.name)
        return
    with Image.open(path) as figure:
        figure.convert("RGB").quantize(256).save(folder / path.name, optimize=True)


def _is_newest(path: Path, others: list[Path]) -> bool:
    """Whether a file is there, and newer than those of the others that are."""
    if not path.exists():
        return False
    times = [other.stat().st_mtime for other in others if other.exists()]
    return path.stat().st_mtime >= max(times, default=0.0)


def _measured(results: dict[tuple[str, str], Path]) -> list[dict[str, Any]]:
    """Every single number of every evaluation, before means over seeds are made of them."""
    return [
        {"run": run, "evaluation": evaluation, "metric": metric, "value": value}
        for (run, evaluation), path in results.items()
        for metric, value in flat(read_json(path)["metrics"])
    ]


def _images(experiment: Experiment) -> dict[str, Any]:
    """Number and digest of the images of every split that is sharded."""
    found = {}
    for dataset, split in experiment.splits:
        index = read_mapping(experiment.shards(dataset, split) / "index.json")
        if index:
            found[f"{dataset} {split}"] = {"n": index["n"], "digest": index["digest"]}
    return found


def _write(lines: list[dict[str, Any]], path: Path, columns: list[str] | None = None) -> None:
    write_text(path, pd.DataFrame(lines, columns=columns).to_csv(index=False, lineterminator="\n"))


def _runs(here: Here, published: Published) -> list[dict[str, Any]]:
    """What every run of the experiment is, how far it has come, and what it cost."""
    experiment, machine = here.experiment, _machine()
    lines: list[dict[str, Any]] = []
    for run in experiment.runs.values():
        if run.name in published.runs:
            lines.append(dict(published.runs[run.name]))
            continue
        folder = experiment.folder(run.name)
        steps = json_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        record = here.runs.get(run.name, {})
        last = steps[-1] if steps else {"step": 0, "epoch": 0.0, "timing": {"device_seconds": 0.0}}
        images = last["step"] * getattr(run.settings, "batch_size", 0)
        lines.append(
            {
                "run": run.name,
                "stage": run.stage,
                "from": run.source,
                "seed": run.seed,
                "epochs": getattr(run.settings, "epochs", 0),
                "epochs_done": round(last["epoch"], 2),
                "finished": bool(record),
                "operations": float(f"{run.settings.flops_per_image(run.encoder) * images:.4g}"),
                "device_hours": round(last["timing"]["device_seconds"] / 3600, 3),
                "revision": (record.get("source_revision") or "")[:12],
                "encoder_sha256": checksum(record),
                "weights": weights(record) if record else "",
                "nnclr_loss": _first_nnclr_loss(run.name, experiment) if record else None,
                "machine": machine if record else "",
            }
        )
    return lines


def _first_nnclr_loss(run: str, experiment: Experiment) -> float | None:
    """What the claims compare of a pre-training with an NNCLR head."""
    if experiment.runs[run].source is not None:
        return None
    frame = pretraining_table([Row("any", "any", (run,))], experiment.root / "runs")
    return None if frame.empty else float(frame["nnclr_loss"].iloc[0])


def _curves(experiment: Experiment, published: Published) -> list[dict[str, Any]]:
    """Loss and looks of every run, where it was looked at."""
    lines: list[dict[str, Any]] = []
    for run in experiment.runs:
        if run in published.runs:
            lines += published.curves[run]
        elif (path := experiment.folder(run) / "metrics.jsonl").exists():
            lines += [{"run": run} | step for step in json_lines(path) if LOOKS[0] in step]
    return lines


def _pilots(experiment: Experiment) -> list[dict[str, Any]]:
    """Every pilot: what it starts from, what it changes, and its k-NN on held-out images."""
    lines = []
    for run, evaluation in experiment.evaluations:
        path = experiment.root / "evaluations" / run / f"{evaluation}.json"
        one = experiment.runs[run]
        spec = next(s for t, s in experiment.spec.runs.items() if _fits(t, run))
        values = dict(zip(spec.each, re.findall(r"[\d.]+$", run), strict=False))
        changes = str(spec.overrides).replace("'{x}'", values.get("x", ""))
        knn = read_json(path)["metrics"]["knn"] if path.exists() else None
        lines.append(
            {
                "run": run,
                "recipe": one.recipe,
                "from": one.source,
                "changes": re.sub(r"['{}]", "", changes),
                "knn": knn,
            }
        )
    return lines


def _fits(template: str, run: str) -> bool:
    return re.fullmatch(re.escape(template).replace(r"\{x\}", r"[\d.]+"), run) is not None


def _machine() -> str:
    """This machine, in a line."""
    import torch

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*: (.*)", text)
    cores = text.count("\nprocessor") + text.startswith("processor")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"{cores} cores of {model[1] if model else platform.processor()} (accelerator: {device}), "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


# --- CSV to pages ---------------------------------------------------------------------------------


def pages(folder: Path) -> dict[str, str]:
    """The pages of a published experiment, by file name; `headline.md` is for the README."""
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False)
    headline, progress = _headline(folder, runs), _progress(folder, runs)
    made = {"README.md": _page(folder, runs, headline, progress)}
    if (folder / "recipes.csv").exists():
        made["recipes.md"] = _recipes(pd.read_csv(folder / "recipes.csv", keep_default_na=False))
        if (folder / "replaced.csv").exists():
            replaced = pd.read_csv(folder / "replaced.csv", dtype=str)
            told = (
                "A run that was evaluated and then replaced, beside the others of its seed; on "
                "test images where no training image is named."
            )
            made["recipes.md"] += f"\n## Replaced\n\n{told}\n\n{_markdown(replaced)}\n"
        if (folder / "tried.csv").exists():
            tried = pd.read_csv(folder / "tried.csv", dtype=str).fillna("")
            made["recipes.md"] += f"\n## Also tried\n\n{_markdown(tried)}\n"
    if headline:
        made["headline.md"] = headline
        if progress:
            made["headline.md"] += f"\n\nIn progress: {progress} are finished."
    return made


def _page(folder: Path, runs: pd.DataFrame, headline: str, progress: str) -> str:
    name = folder.name
    parts = [
        f"# {name}",
        f"    snakemake --profile cluster_profiles/local --config experiment={name}\n"
        f"    python docs/results/publish.py collect {name}\n"
        f"    python docs/results/publish.py page {name}",
    ]
    if progress:
        parts.append(
            f"**Unfinished: {progress}.** Numbers, figures and claims below are of what is "
            "finished."
        )
    if headline:
        parts.append(headline)
    if (folder / "measured.csv").exists() and (gains := _gains(folder, runs)):
        parts.append(gains)
    parts.append(_notes(folder, runs))
    if (folder / "neighbours.csv").exists():
        published = pd.read_csv(folder / "neighbours.csv", dtype=str)
        parts += [
            "Published encoders of the same shape, trained for 100 epochs on other images and "
            "evaluated on CIFAR-10, in percent, by their sources:",
            _markdown(published),
        ]
    if (folder / "recipes.csv").exists():
        parts.append("What was tried to choose the recipes: [recipes](recipes.md).")
    if (folder / "claims.csv").exists():
        parts += ["## Claims", _claims(pd.read_csv(folder / "claims.csv", keep_default_na=False))]
    shown = [name for name in TABLES if (folder / "tables" / f"{name}.csv").exists()]
    if shown:
        parts.append("## Tables")
        for table in shown:
            frame = read_table(folder / "tables" / f"{table}.csv")
            parts += [render(printed(frame, table), "md").strip(), TABLES[table].about(False)]
    drawn = [name for name in FIGURES if (folder / "figures" / f"{name}.png").exists()]
    if drawn:
        parts.append("## Figures")
        for figure in drawn:
            entry = FIGURES[figure]
            parts.append(f"![{entry.title}](figures/{figure}.png)\n\n{entry.about(True)}")
    machines = filter(None, dict.fromkeys(runs["machine"]))
    parts.append("## Runs")
    if (folder / "images.json").exists():
        splits = read_json(folder / "images.json").items()
        told = "; ".join(f"{name}: {a['n']:,} ({a['digest'][:12]})" for name, a in splits)
        parts.append(f"Images, and where the digest of each split begins: {told or 'none yet'}.")
    parts += [
        f"On {' and on '.join(machines) or 'no machine yet'}. Operations are counted from the "
        "settings; device hours are wall-clock hours times ranks, also where other work shared the "
        "cores. What each finished run was told is in `resolved/`; `curves.csv` has losses and "
        "looks, `runs.csv` the fine-tunings, too, with revisions and checksums of encoders, and "
        "`measured.csv` every number of every evaluation.",
        _runs_table(runs),
    ]
    return "\n\n".join(parts) + "\n"


def _progress(folder: Path, runs: pd.DataFrame) -> str:
    """How much of the experiment there is; empty for all of it."""
    trained, results = int(runs["finished"].sum()), read_json(folder / "evaluations.json")
    missing = results.get("missing", [])
    if trained == len(runs) and results["made"] == results["asked"] and not missing:
        return ""
    done = f"{trained} of {len(runs)} trainings"
    return f"{done}, {results['made']} of {results['asked']} evaluations"


def _headline(folder: Path, runs: pd.DataFrame) -> str:
    """The main models and what tuning costs; empty before their tables are made."""
    made = [folder / f"tables/{table}.csv" for table in ("low_shot", "clustering")]
    if not all(path.exists() for path in made):
        return ""
    probed, clusters = map(read_table, made)
    frame = probed.merge(clusters, on=["architecture", "method"], suffixes=("", "_clusters"))
    columns = (*HEADLINE, "accuracy")
    stems = [f"{line['method']}_{line['architecture']}" for line in frame.to_dict("records")]
    costs = [_operations_behind(_seeds(stem, runs), runs) for stem in stems]
    most = max((cost for cost in costs if not math.isnan(cost)), default=0.0)
    unit, power = (1e15, "10¹⁵") if most >= 1e14 else (1e12, "10¹²")
    titles = (
        "1 shot",
        "2 shot",
        "5 shot",
        "linear probe",
        "k-NN",
        "cluster accuracy",
        f"operations ({power})",
        "seeds",
    )
    lines = [f"| | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    several = (folder / "measured.csv").exists()
    trained = set(pd.read_csv(folder / "measured.csv")["run"] if several else runs["run"])
    for line, stem, cost in zip(frame.to_dict("records"), stems, costs, strict=True):
        cells = [_spread(line[c], line[f"{c}_std"]) for c in columns]
        cells.append(MISSING if math.isnan(cost) else f"{cost / unit:.2f}")
        cells.append(str(len(trained.intersection(_seeds(stem, runs)))))
        lines.append(f"| {method_title(str(line['method']))} | {' | '.join(cells)} |")
    return "\n".join(lines)


GAINS = {
    "k-NN": ("knn", "knn"),
    "linear probe": ("linear_probe", "linear_probe"),
    "1 shot": ("low_shot", "low_shot_1"),
    "cluster accuracy": ("clustering", "accuracy"),
}
"""Evaluation and metric of what tuning adds."""


def _gains(folder: Path, runs: pd.DataFrame) -> str:
    """What tuning adds to the MAE of the same seed, and its cost; empty if nothing is there."""
    measured = pd.read_csv(folder / "measured.csv")
    values = measured.set_index(["run", "evaluation", "metric"])["value"].to_dict()
    size = next((run.removeprefix("mae_") for run in runs["run"] if run.startswith("mae_")), "")
    lines, seeds = [], set()
    for method in ("ct_min", "ct_aug"):
        cells = []
        for key in GAINS.values():
            added = [
                values[tuned, *key] - values[mae, *key]
                for tuned in _seeds(f"{method}_{size}", runs)
                if (mae := tuned.replace(method, "mae"), *key) in values and (tuned, *key) in values
            ]
            seeds.add(len(added))
            std = statistics.stdev(added) if len(added) > 1 else math.nan
            cells.append(f"{statistics.fmean(added):+.1f}" if added else MISSING)
            cells[-1] += f" ± {std:.1f}" if not math.isnan(std) else ""
        if all(cell == MISSING for cell in cells):
            continue
        behind = _seeds(f"{method}_{size}", runs)
        total = _operations_behind(behind, runs)
        first = _operations_behind(behind, runs, only_first=True)
        shares = (total - first) / first, (total - first) / total
        cells += [MISSING if math.isnan(share) else f"{100 * share:.0f} %" for share in shares]
        lines.append(f"| {method_title(method)} | {' | '.join(cells)} |")
    if not lines:
        return ""
    titles = [*GAINS, "operations, of the pre-training's", "of all"]
    many = " and ".join(map(str, sorted(seeds - {0})))
    many += " seed" if many == "1" else " seeds"
    return "\n".join([
        "What tuning adds to the MAE of the same seed, in points (mean ± standard deviation of "
        f"{many}), and what head initialisation and tuning take:",
        "",
        f"| | {' | '.join(titles)} |",
        f"| --- |{' ---: |' * len(titles)}",
        *lines,
    ])  # fmt: skip


def _notes(folder: Path, runs: pd.DataFrame) -> str:
    """Notes with numbers filled in.

    `{RUN.COLUMN}` is from `runs.csv`, `{RUN/EVALUATION/METRIC}` from `measured.csv`, and
    `{RUN:COLUMN}` from the last look in `curves.csv`.
    """
    text = (folder / "notes.md").read_text(encoding="utf-8").strip()
    known = runs.set_index("run")
    text = re.sub(r"\{([\w-]+)\.(\w+)\}", lambda m: f"{known.at[m[1], m[2]]:g}", text)
    values: dict[str, float] = {}
    if (folder / "measured.csv").exists():
        for line in pd.read_csv(folder / "measured.csv").to_dict("records"):
            values[f"{line['run']}/{line['evaluation']}/{line['metric']}"] = line["value"]
    if (folder / "curves.csv").exists():
        for run, last in pd.read_csv(folder / "curves.csv").groupby("run").last().iterrows():
            values |= {f"{run}:{name}": value for name, value in last.items()}
    return re.sub(
        r"\{([\w-]+[/:][\w/]+)\}",
        lambda m: f"{values[m[1]]:.1f}" if m[1] in values else MISSING,
        text,
    )


def _spread(value: float, std: float) -> str:
    if pd.isna(value):
        return MISSING
    return f"{value:.1f}" if pd.isna(std) else f"{value:.1f} ± {std:.1f}"


def _operations_behind(seeds: Iterable[str], runs: pd.DataFrame, only_first: bool = False) -> float:
    """Of all training behind the first of these runs of which all is finished, NaN if none is.

    Args:
        seeds: runs of a model.
        runs: lines of `runs.csv`.
        only_first: of the training that it began with.
    """
    known = runs[runs["finished"].astype(str) == "True"].set_index("run")
    for seed in seeds:
        costs, name = list[float](), seed
        while name in known.index:
            costs.append(float(known.at[name, "operations"]))
            name = str(known.at[name, "from"] or "")
        if costs and not name:
            return costs[-1] if only_first else sum(costs)
    return math.nan


def _seeds(stem: str, runs: pd.DataFrame) -> list[str]:
    """The runs of a model, one a seed."""
    return [
        run for run in map(str, runs["run"]) if re.fullmatch(rf"{re.escape(stem)}(-s\d+)?", run)
    ]


def _claims(frame: pd.DataFrame) -> str:
    said = verdicts(frame)
    rows = []
    for line in said["decided"]:
        verdict = "; ".join([line["verdict"], *line["notes"]])
        rows.append(f"| {line['statement']} | {verdict} | {line['numbers']} |")
    head = "| statement | verdict | differences ± standard deviation |\n| --- | --- | --- |"
    return f"{len(frame)} statements: {said['summary']}.\n\n{LEGEND}\n\n{head}\n" + "\n".join(rows)


LEGEND = """\
Differences are of means over seeds, with the standard deviation that they have if the seeds are
independent. *Within noise*: the difference does not exceed it. That is a weak test: where nothing
differs, chance alone exceeds it in about one comparison of six with three seeds each, of three or
four with two, and a statement may have many. A model of one seed is given the largest deviation
that models of its size have in the same metric; *or more*: that of one side only is known. Where
none is printed there is one seed of everything, or no chance at all, as in operations, which decide
the statement on cost. Which statements were not measured is in `claims.csv`."""


def _runs_table(runs: pd.DataFrame) -> str:
    """Without the fine-tunings, of which there are many: `runs.csv` has them."""
    runs = runs[runs["stage"] != "fine_tune"]
    head = "| run | stage | epochs | done | 10¹² operations | device hours |\n"
    head += "| --- | --- | ---: | ---: | ---: | ---: |\n"
    return head + "\n".join(
        f"| `{line['run']}` | {line['stage']} | {line['epochs']} | {line['epochs_done']:g} | "
        f"{float(line['operations']) / 1e12:,.0f} | {line['device_hours']:.2f} |"
        for line in runs.to_dict("records")
    )


def _recipes(pilots: pd.DataFrame) -> str:
    rows = [
        f"| `{line['run']}` | {line['recipe']} | {line['from'] or '-'} | {line['changes'] or '-'} "
        + (f"| {float(line['knn']):.1f} |" if line["knn"] != "" else "| not run yet |")
        for line in pilots.to_dict("records")
    ]
    return (
        "# How the recipes were chosen\n\n"
        "k-NN accuracy on training images that were held out, by [pilots.yaml](pilots.yaml); the "
        "test images took no part in these pilots. Only what they change was compared; the rest is "
        "the recipe's.\n\n"
        "| pilot | recipe | starts from | changes | k-NN |\n| --- | --- | --- | --- | ---: |\n"
        + "\n".join(rows)
        + "\n"
    )


def _markdown(frame: pd.DataFrame) -> str:
    lines = [list(frame), ["---", *["---:"] * (len(frame.columns) - 1)], *frame.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_headline(readme: str, name: str, headline: str) -> str:
    """A README with the text between its two comments replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in readme:
        return readme
    before, rest = readme.split(start)
    return f"{before}{start}\n{headline}\n{end}{rest.split(end)[1]}"


def write_pages(name: str) -> None:
    """Write the pages, and the headline into the project's README."""
    made = pages(HERE / name)
    if headline := made.pop("headline.md", None):
        readme = ROOT / "README.md"
        write_text(readme, with_headline(readme.read_text(encoding="utf-8"), name, headline))
    for file, text in made.items():
        write_text(HERE / name / file, text)


def main() -> None:
    """`collect NAME` or `page NAME`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["collect", "page"])
    parser.add_argument("experiment")
    options = parser.parse_args()
    (collect if options.what == "collect" else write_pages)(options.experiment)


if __name__ == "__main__":
    sys.exit(main())
