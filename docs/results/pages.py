"""Fills results pages and the README's tables with published numbers, and with nothing else."""

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from maect.core.files import read_json
from maect.records import seedless
from maect.report.bounds import LEVEL, chance_of
from maect.report.registry import TABLES, method_title
from maect.report.render import MISSING
from maect.report.tables import paper_value, read_table

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
"""Texts of the pages. `<!-- numbers of FOLDER -->` begins a part with that experiment's numbers."""
HEADLINE = ("low_shot_1", "low_shot_2", "low_shot_5", "linear_probe", "knn")


def page(source: Path) -> str:
    """Fill a page's text with the numbers of the experiments that its parts name."""
    first, *parts = re.split(r"^<!-- numbers of (\w+) -->\n", source.read_text("utf-8"), flags=re.M)
    if "{experiments}" in first:
        first = first.replace("{experiments}", experiments_table(HERE))
    filled = [
        _filled(text, HERE / folder) for folder, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return "".join([first, *filled])


def experiments_table(folder: Path) -> str:
    """List the published experiments of which something is missing."""
    lines = ["| experiment | trainings | evaluations | missing |", "| --- | ---: | ---: | --- |"]
    for path in sorted(folder.glob("*/runs.csv")):
        runs = pd.read_csv(path, keep_default_na=False)
        counts = read_json(path.parent / "evaluations.json")
        trained, missing = int(runs["finished"].sum()), sorted(counts.get("missing", []))
        if trained == len(runs) and counts["made"] == counts["asked"] and not missing:
            continue
        cells = [
            f"[{path.parent.name}]({path.parent.name}/runs.csv)",
            f"{trained} of {len(runs)}",
            f"{counts['made']} of {counts['asked']}",
            ", ".join(missing),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(folder: Path) -> str:
    """Return the README's table of an experiment; "" before its tables are made."""
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False)
    table, progress = _headline(folder, runs), _progress(folder, runs)
    if table and progress:
        table += f"\n\nIn progress: {progress} are finished."
    return table


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


def _filled(text: str, folder: Path) -> str:
    """Fill one experiment's numbers into a text.

    `{gains}` is the table of the main models, `{RUN.COLUMN}` from `runs.csv`,
    `{RUN/EVALUATION/METRIC}` from `measured.csv`, `{RUN:COLUMN}` from the last online evaluation in
    `curves.csv`. `{mean RUN/EVALUATION/METRIC}` is the mean over seeds, `{spread ...}` with its
    standard deviation, `{seeds ...}` every seed's value. `{gain ...}` is the mean difference from
    the MAE of the same seed, `{gained ...}` the same with ± and its test. `{claims VERDICT}` counts
    the statements with that verdict.
    """
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False)
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
        if how == "gained ":
            return _gain(run, key, values, runs)
        if how == "gain ":
            found, form = _added(run, key, values, runs), "+.1f"
        else:
            named = _seeds(run, runs) if how else [run]
            found, form = [values[one, *key] for one in named if (one, *key) in values], ".1f"
        if not found:
            return MISSING
        if how == "seeds ":
            return ", ".join(f"{value:.1f}" for value in found)
        if how == "spread " and len(found) > 1:
            return _spread(statistics.fmean(found), statistics.stdev(found))
        return f"{statistics.fmean(found):{form}}"

    text = re.sub(r"\{(mean |spread |gain |gained |seeds )?([\w.-]+)/(\w+)/(\w+)\}", number, text)

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


def with_headline(readme: str, name: str, headline: str) -> str:
    """A README with the text between its two comments replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in readme:
        return readme
    before, rest = readme.split(start)
    return f"{before}{start}\n{headline}\n{end}{rest.split(end)[1]}"
