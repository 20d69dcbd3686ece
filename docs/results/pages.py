"""The pages of a published experiment: what its CSV files say, and nothing else."""

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from maect.core.files import read_json
from maect.core.seeds import seedless
from maect.report.claims import LEVEL, chance_of
from maect.report.registry import FIGURES, TABLES
from maect.report.render import MISSING, printed, render, verdicts
from maect.report.tables import paper_value, read_table
from maect.report.titles import method_title

EXPERIMENTS = Path(__file__).parents[2] / "workflow/experiments"
HEADLINE = ("low_shot_1", "low_shot_2", "low_shot_5", "linear_probe", "knn")


def pages(folder: Path) -> dict[str, str]:
    """The pages of a published experiment, by file name; `headline.md` is for the README."""
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False)
    headline, progress = _headline(folder, runs), _progress(folder, runs)
    made = {"README.md": _page(folder, runs, headline, progress)}
    if (folder / "recipes.csv").exists():
        made["recipes.md"] = _recipes(pd.read_csv(folder / "recipes.csv", keep_default_na=False))
        if (folder / "replaced.csv").exists():
            replaced = pd.read_csv(folder / "replaced.csv", dtype=str)
            note = (
                "A run that was evaluated and then replaced, beside the others of its seed; on "
                "test images where no training image is named. Copied by hand from the results of "
                "that time."
            )
            made["recipes.md"] += f"\n## Replaced\n\n{note}\n\n{_markdown(replaced)}\n"
        if (folder / "tried.csv").exists():
            tried = pd.read_csv(folder / "tried.csv", dtype=str).fillna("")
            note = "Likewise copied by hand."
            made["recipes.md"] += f"\n## Also tried\n\n{note}\n\n{_markdown(tried)}\n"
    if headline:
        made["headline.md"] = headline
        if progress:
            made["headline.md"] += f"\n\nIn progress: {progress} are finished."
    return made


def _page(folder: Path, runs: pd.DataFrame, headline: str, progress: str) -> str:
    """What was found, with one table and one figure; then how, what differs, and everything."""
    name = folder.name
    how = (
        f"{_variables(name)}"
        f"    snakemake --profile cluster_profiles/local --config experiment={name}\n"
        f"    python docs/results/publish.py collect {name}\n"
        f"    python docs/results/publish.py page {name}"
    )
    parts = []
    if (folder / "found.md").exists():
        headings = re.findall(r"^## (.+)$", (folder / "notes.md").read_text("utf-8"), re.MULTILINE)
        claims = ["Claims"] if (folder / "claims.csv").exists() else []
        below = [*claims, *headings, "Tables", "Figures", "Runs"]
        links = (f"[{one}](#{one.lower().replace(' ', '-')})" for one in below)
        parts += [
            _filled((folder / "found.md").read_text(encoding="utf-8"), folder, runs),
            f"Below: {' · '.join(links)}.",
            "## How",
        ]
    else:
        parts.append(f"# {name}")
    parts.append(how)
    if progress:
        parts.append(
            f"**Unfinished: {progress}.** Numbers, figures and claims below are of what is "
            "finished."
        )
    if missing := read_json(folder / "evaluations.json").get("missing"):
        parts.append(f"**Missing: {', '.join(sorted(missing))}.**")
    if headline:
        parts.append(headline)
    if chosen := _after_tests(folder):
        parts.append(
            f"{CHOSEN} Chosen after test results had been seen: {'; '.join(chosen.values())}."
        )
    parts.append(_filled((folder / "notes.md").read_text(encoding="utf-8"), folder, runs))
    if (folder / "neighbours.csv").exists():
        published = pd.read_csv(folder / "neighbours.csv", dtype=str)
        parts += [
            "Published encoders of the same shape, trained for 100 epochs on other images and "
            "evaluated on CIFAR-10, in percent, copied from their sources:",
            _markdown(published),
        ]
    if (folder / "recipes.csv").exists():
        parts.append("What was tried to choose the recipes: [recipes](recipes.md).")
    if (folder / "claims.csv").exists():
        parts += ["## Claims", _claims(folder)]
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
    machines = [*filter(None, dict.fromkeys(runs["machine"]))]
    parts.append("## Runs")
    if (folder / "images.json").exists():
        splits = read_json(folder / "images.json").items()
        listed = "; ".join(f"{name}: {a['n']:,} ({a['digest'][:12]})" for name, a in splits)
        parts.append(f"Images, and where the digest of each split begins: {listed or 'none yet'}.")
    parts += [
        f"On {' and on '.join(machines) or 'no machine yet'}. {_unrecorded(machines)}"
        "Operations, of matrix products, are "
        "counted from the settings and not measured; device hours are wall-clock hours times "
        "ranks, also where other work shared the cores. The config of each finished run is in "
        "`resolved/`; `curves.csv` has online evaluations and the loss of their steps, `runs.csv` "
        "the fine-tunings, too, with revisions and checksums of encoders, and `measured.csv` every "
        "number of every evaluation.",
        _runs_table(runs),
    ]
    return "\n\n".join(parts) + "\n"


def _unrecorded(machines: Iterable[str]) -> str:
    """Return a sentence on what these lines of machines leave open; "" if they say it all."""
    if all("bfloat16" in machine for machine in machines):
        return ""
    return (
        "Whether the CPU computes bfloat16 and, beyond its name, its model were not recorded; "
        "another kind of CPU gives [other last bits](../../method.md#exactness), and so other "
        "numbers. "
    )


def _variables(experiment: str) -> str:
    """Lines that say where the images of an experiment are."""
    file = EXPERIMENTS / f"{experiment}.yaml"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    names = dict.fromkeys(re.findall(r"images: \$(\w+)", text))
    return "".join(f"    export {name}=FOLDER\n" for name in names)


def _progress(folder: Path, runs: pd.DataFrame) -> str:
    """Return how many trainings and evaluations are finished; "" if all are."""
    trained, results = int(runs["finished"].sum()), read_json(folder / "evaluations.json")
    if trained == len(runs) and results["made"] == results["asked"]:
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
    costs = [operations_behind(_seeds(stem, runs), runs) for stem in stems]
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
    trained = set(pd.read_csv(folder / "measured.csv")["run"])
    chosen = _after_tests(folder)
    for line, stem, cost in zip(frame.to_dict("records"), stems, costs, strict=True):
        cells = [_spread(line[c], line[f"{c}_std"]) for c in columns]
        cells.append(MISSING if math.isnan(cost) else f"{cost / unit:.2f}")
        cells.append(str(len(trained.intersection(_seeds(stem, runs)))))
        title = method_title(str(line["method"])) + _mark([str(line["method"])], chosen)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


CHOSEN = "†"


def _after_tests(folder: Path) -> dict[str, str]:
    """What was chosen after test results had been seen, by a pattern of methods."""
    path = folder / "after_tests.csv"
    return dict(pd.read_csv(path).to_numpy().tolist()) if path.exists() else {}


def _mark(methods: Iterable[str], chosen: Iterable[str]) -> str:
    """The sign of what was chosen so, if any of these methods was."""
    return CHOSEN if any(re.fullmatch(one, name) for one in chosen for name in methods) else ""


GAINS = {
    "1 shot": ("low_shot", "low_shot_1"),
    "2 shot": ("low_shot", "low_shot_2"),
    "5 shot": ("low_shot", "low_shot_5"),
    "linear probe": ("linear_probe", "linear_probe"),
    "k-NN": ("knn", "knn"),
    "cluster accuracy": ("clustering", "accuracy"),
}
"""Evaluation and metric of what tuning adds."""
Values = dict[tuple[str, str, str], float]
"""Numbers by run, evaluation and metric."""


def _measured(folder: Path) -> Values:
    frame = pd.read_csv(folder / "measured.csv")
    values = frame.set_index(["run", "evaluation", "metric"])["value"].to_dict()
    return cast(Values, values)


def _added(tuned: str, key: tuple[str, str], values: Values, runs: pd.DataFrame) -> list[float]:
    """What a tuned model has more than the MAE of the same seed, for each seed of both."""
    size = tuned.rpartition("_")[2]
    pairs = [(run, run.replace(seedless(run), f"mae_{size}")) for run in _seeds(tuned, runs)]
    return [
        values[run, *key] - values[mae, *key]
        for run, mae in pairs
        if (run, *key) in values and (mae, *key) in values
    ]


def _gain(tuned: str, key: tuple[str, str], values: Values, runs: pd.DataFrame) -> str:
    """What tuning adds to the MAE of the same seed, ± over seeds, and whether that is undecided.

    By the claims' test: over seeds and, with few labels, over the sets of labels as well. One seed
    has neither.
    """
    added = _added(tuned, key, values, runs)
    if not added:
        return MISSING
    sets = [_added(tuned, (key[0], f"{key[1]}_splits/{n}"), values, runs) for n in range(3)]
    tests = [added, [statistics.fmean(one) for one in sets if one]]
    decided = [chance_of(one) <= LEVEL for one in tests if len(one) > 1]
    cell = f"{statistics.fmean(added):+.1f}"
    cell += f" ± {statistics.stdev(added):.1f}" if len(added) > 1 else ""
    return cell if all(decided) else f"{cell}, undecided"


def _of_paper(table: str, method: str, metric: str) -> float | None:
    """What the paper prints of a ViT-B; of its own MAE table 17, where table 1 quotes another's."""
    is_quoted = method == "mae" and metric in TABLES[table].of_public.get("base", ())
    return paper_value("extended" if is_quoted else table, "base", method, metric)


def _least_views(config: Path) -> str:
    """The views of minimal augmentation, by the config of a run; flips where there is none yet."""
    known = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else None
    return "crops" if known and not known["settings"]["flip"] else "crops and flips"


def gains_table(folder: Path, runs: pd.DataFrame) -> str:
    """The main models: what MAE has, what either tuning adds and costs, and the paper's ViT-B."""
    values, chosen = _measured(folder), _after_tests(folder)
    size = next((run.removeprefix("mae_") for run in runs["run"] if run.startswith("mae_")), "")
    tuned = ("ct_min", "ct_aug")
    heads = (
        f"+ {_least_views(folder / f'resolved/ct_min_{size}.yaml')}",
        "+ colours",
        "paper, ViT-B: MAE, + crops and flips, + colours",
    )
    heads = (heads[0] + _mark(tuned[:1], chosen), heads[1] + _mark(tuned[1:], chosen), heads[2])
    lines = [f"| | MAE | {' | '.join(heads)} |", f"| --- |{' ---: |' * 4}"]
    for title, key in GAINS.items():
        table = "clustering" if key[0] == "clustering" else "low_shot"
        known = [values[run, *key] for run in _seeds(f"mae_{size}", runs) if (run, *key) in values]
        cells = [f"{statistics.fmean(known):.1f}" if known else MISSING]
        cells += [_gain(f"{method}_{size}", key, values, runs) for method in tuned]
        printed_by = [_of_paper(table, method, key[1]) for method in ("mae", *tuned)]
        mae = printed_by[0]
        of_paper = [
            f"{one - mae:+.1f}" for one in printed_by[1:] if one is not None and mae is not None
        ]
        cells.append(", ".join([f"{mae:.1f}", *of_paper]) if of_paper else MISSING)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    shares = []
    for method in tuned:
        behind = _seeds(f"{method}_{size}", runs)
        first = operations_behind(behind, runs, only_first=True)
        share = (operations_behind(behind, runs) - first) / first
        shares.append(MISSING if math.isnan(share) else f"{100 * share:.0f} %")
    lines.append(f"| operations after MAE, of MAE's | | {' | '.join(shares)} | |")
    return "\n".join(lines)


def _filled(text: str, folder: Path, runs: pd.DataFrame) -> str:
    """A text with numbers filled in.

    `{gains}` is the table of the main models, `{RUN.COLUMN}` from `runs.csv`,
    `{RUN/EVALUATION/METRIC}` from `measured.csv`, `{RUN:COLUMN}` from the last online evaluation in
    `curves.csv`; `{mean RUN/EVALUATION/METRIC}` is the mean over seeds, `{gain ...}` that of what
    it has more than the MAE of the same seed, and `{seeds ...}` the value of every seed, also of a
    evaluation; `{claims VERDICT}` is how many statements have that verdict.
    """
    text = text.strip()
    if "{gains}" in text:
        text = text.replace("{gains}", gains_table(folder, runs))
    if "{claims " in text:
        verdict = pd.read_csv(folder / "claims.csv", keep_default_na=False)["verdict"]
        text = re.sub(r"\{claims ([a-z ]+)\}", lambda m: str((verdict == m[1]).sum()), text)
    known, values = runs.set_index("run"), _measured(folder)
    text = re.sub(
        r"\{([\w-]+)\.(\w+)\}", lambda m: f"{float(cast(Any, known.at[m[1], m[2]])):g}", text
    )
    online: dict[tuple[str, str], float] = {}
    if (folder / "curves.csv").exists():
        for run, last in pd.read_csv(folder / "curves.csv").groupby("run").last().iterrows():
            online |= {(str(run), str(name)): value for name, value in last.items()}

    def number(match: re.Match[str]) -> str:
        how, run, evaluation, metric = match.groups()
        key = evaluation, metric
        if how == "gain ":
            found, form = _added(run, key, values, runs), "+.1f"
        else:
            named = _seeds(run, runs) if how else [run]
            found, form = [values[one, *key] for one in named if (one, *key) in values], ".1f"
        if not found:
            return MISSING
        if how == "seeds ":
            return ", ".join(f"{value:.1f}" for value in found)
        return f"{statistics.fmean(found):{form}}"

    text = re.sub(r"\{(mean |gain |seeds )?([\w.-]+)/(\w+)/(\w+)\}", number, text)

    def filled(match: re.Match[str]) -> str:
        how, run, column = match.groups()
        named = _seeds(run, runs) if how else [run]
        found = [online[one, column] for one in named if (one, column) in online]
        return ", ".join(f"{one:.1f}" for one in found if not math.isnan(one)) or MISSING

    return re.sub(r"\{(seeds )?([\w.-]+):(\w+)\}", filled, text)


def _spread(value: float, std: float) -> str:
    if pd.isna(value):
        return MISSING
    return f"{value:.1f}" if pd.isna(std) else f"{value:.1f} ± {std:.1f}"


def operations_behind(seeds: Iterable[str], runs: pd.DataFrame, only_first: bool = False) -> float:
    """Of all training behind the first of these runs of which all is finished, NaN if none is.

    Args:
        seeds: runs of a model.
        runs: lines of `runs.csv`.
        only_first: of the training that it began with, NaN if that was not trained here.
    """
    known = runs[runs["finished"].astype(str) == "True"].set_index("run")
    for seed in seeds:
        costs, name = list[float](), seed
        while name in known.index:
            costs.append(float(cast(Any, known.at[name, "operations"])))
            name = str(known.at[name, "from"] or "")
        if costs and not name:
            return (costs[-1] or math.nan) if only_first else sum(costs)
    return math.nan


def _seeds(stem: str, runs: pd.DataFrame) -> list[str]:
    """The runs of a model, one a seed."""
    return [run for run in map(str, runs["run"]) if seedless(run) == stem]


def _claims(folder: Path) -> str:
    frame = pd.read_csv(folder / "claims.csv", keep_default_na=False)
    said, rows, chosen = verdicts(frame), [], _after_tests(folder)
    for line in said["decided"]:
        methods = re.findall(r"[a-z]\w*\.[\w*]+\.(\w+)\.\w+", line["expression"])
        verdict = "; ".join([line["verdict"] + _mark(methods, chosen), *line["notes"]])
        rows.append(f"| {line['statement']} | {verdict} | {line['numbers']} |")
    head = "| statement | verdict | numbers ± standard deviation |\n| --- | --- | --- |"
    return f"{said['summary']}.\n\n{LEGEND}\n\n{head}\n" + "\n".join(rows)


LEGEND = """\
A difference is computed seed by seed, since a tuned encoder begins with the MAE of its seed; it is
the mean over the seeds that all models of the comparison have, ± the standard deviation over these.
Where the right side is a number, the left one is printed. *Within noise*: chance may have made it.
With several seeds in common a paired t-test at 5 % decides (of three, a difference has to exceed
2.5 of its standard deviations), and with few labels the same test over the sets of labelled images
as well, whose differences are printed. Otherwise 2.5 standard deviations of a difference of
independent values decide: a model of one seed has the largest that models of its size have in the
same metric, and the binomial error of an accuracy on so many images beside it. Where no seed says
how much a training varies, that error is the least there is (*or more*), and *in one seed; others
may differ* stands beside what exceeds it. *Not comparable*: models of the statement were
pre-trained for different numbers of epochs, so that it has no verdict. Of many comparisons some
fail by chance: the more a statement has, the surer one that fails has to be (Hochberg's procedure).
No ± is printed where nothing is random, as in operations. Which statements were not measured is in
`claims.csv`."""


def _runs_table(runs: pd.DataFrame) -> str:
    """Without the fine-tunings, of which there are many: `runs.csv` has them."""
    head = "| run | stage | epochs | done | 10¹² operations | device hours |\n"
    head += "| --- | --- | ---: | ---: | ---: | ---: |\n"
    lines = [
        f"| `{line['run']}` | {line['stage']} | {line['epochs']} | {line['epochs_done']:g} | "
        f"{float(line['operations']) / 1e12:,.0f} | {line['device_hours']:.2f} |"
        for line in runs[runs["stage"] != "fine_tune"].to_dict("records")
    ]
    operations, hours = runs["operations"].astype(float).sum() / 1e12, runs["device_hours"].sum()
    what = "all, fine-tunings too" if (runs["stage"] == "fine_tune").any() else "all"
    return head + "\n".join([*lines, f"| {what} | | | | {operations:,.0f} | {hours:.2f} |"])


def _recipes(pilots: pd.DataFrame) -> str:
    rows = [
        f"| `{line['run']}` | {line['recipe']} | {line['from'] or '-'} | {line['changes'] or '-'} "
        + (f"| {float(line['knn']):.1f} |" if line["knn"] != "" else "| not run yet |")
        for line in pilots.to_dict("records")
    ]
    return (
        "# How the recipes were chosen\n\n"
        "k-NN accuracy on training images that were held out, by [pilots.yaml](pilots.yaml); the "
        "test images took no part in these pilots. What two pilots that start from the same run "
        "have alike was set, and not compared.\n\n"
        "| pilot | recipe | starts from | changes | k-NN |\n| --- | --- | --- | --- | ---: |\n"
        + "\n".join(rows)
        + "\n"
    )


def _markdown(frame: pd.DataFrame) -> str:
    rows: list[list[str]] = frame.to_numpy().tolist()
    lines = [[*frame], ["---", *["---:"] * (len(frame.columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_headline(readme: str, name: str, headline: str) -> str:
    """A README with the text between its two comments replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in readme:
        return readme
    before, rest = readme.split(start)
    return f"{before}{start}\n{headline}\n{end}{rest.split(end)[1]}"
