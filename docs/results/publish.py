"""Publishes experiments: their numbers as CSV files, and the pages that are made of these alone.

    python docs/results/publish.py collect cifar10    # from results/cifar10, beside this file
    python docs/results/publish.py pages              # all results pages and the README's tables

`collect` keeps what was published before: an experiment may be computed in several sittings, on
several machines. `pages` fills the texts in `sources/` and, in the project's README, the tables
between two comments with an experiment's name.
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
from pathlib import Path
from typing import Any

import pandas as pd
from merge import (
    Here,
    Published,
    counts,
    flat,
    merge,
    result_file,
    weights,
    what_is_here,
)
from pages import SOURCES, headline, operations_behind, page, with_headline
from PIL import Image

from maect.core.errors import UserError
from maect.core.files import read_json, seek_record, write_json, write_record, write_text
from maect.experiment import Experiment, load
from maect.experiment.pages import claims_config, figures, inputs_of_shown, shown_config, tables
from maect.experiment.resolve import evaluation_config, run_config
from maect.records import EvaluationRecord, RunRecord, entries
from maect.report.bounds import COST
from maect.report.claims import (
    claims_table,
    tables_of_runs,
    tables_of_seeds,
    tables_of_sets,
)
from maect.report.configs import Row, ShownConfig
from maect.report.figures import draw
from maect.report.registry import FIGURES
from maect.report.tables import build_table, pretraining_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PILOTS = "pilots.yaml"
OF_NUMBERS = (
    *("gpu_hours", "label_efficiency", "pipeline", "color_histogram", "knn_compute"),
    "knn_per_block",
)
"""Figures that need nothing but numbers and records."""
PAIRED = {
    "knn": ("knn", "knn_standardized"),
    "low_shot": ("low_shot_1",),
    "clustering": ("accuracy_mean",),
    "geometry": tuple(
        f"{measure}_{name}"
        for measure in ("knn", "low_shot_1", "accuracy")
        for name in ("raw", "whitened_0.01", "whitened_0.1")
    ),
}
"""Metrics whose outcomes are published, by evaluation: all of them would be megabytes."""


def collect(name: str) -> None:
    """Copy and list all that there is: what was published and is not on this machine stays."""
    experiment, out = load(name), HERE / name
    here = what_is_here(experiment)
    published = counts(here, out)
    for one in published.refuted:
        print(f"{one}: not what was published, or not of it: left out", file=sys.stderr)
    write_json(out / "images.json", read_json(out / "images.json", {}) | _images(experiment))
    with tempfile.TemporaryDirectory() as folder:
        merged = copy.copy(experiment)
        merged.root = Path(folder)
        merge(here, published, merged.root)
        results = {pair: result_file(merged, pair) for pair in experiment.evaluations}
        done = {pair: path for pair, path in results.items() if path.exists()}
        runs = _runs(here, published)
        _write(runs, out / "runs.csv")
        curves = _curves(merged, published)
        online = dict.fromkeys(key for one in curves for key in one if key.startswith("online_"))
        columns = ["run", "step", "epoch", "loss", *online, "lookup_accuracy"]
        _write(curves, out / "curves.csv", columns)
        _write(_measured(done), out / "measured.csv", ["run", "evaluation", "metric", "value"])
        if outcomes := _outcomes(done):
            _write(outcomes, out / "outcomes.csv")
        missing = _tables(merged, pd.DataFrame(runs), out)
        shown = _figures(here, merged, published.shown, out)
        for figure in figures(experiment):
            if set(shown.get(figure, ())) != set(_read(experiment, figure)):
                missing.append(f"{figure}.png")
        write_json(out / "figures.json", shown)
        known = dict(published.results)
        for pair, result in here.results.items():
            settings = evaluation_config(experiment, *pair).digest
            known["/".join(pair)] = {"settings": settings, "left": result.left_sha256 or ""}
        known = {name: known[name] for name in map("/".join, done)}
        counted = {"asked": len(results), "made": len(done), "missing": missing}
        write_json(out / "evaluations.json", counted | {"results": known})
    shutil.rmtree(out / "resolved", ignore_errors=True)
    for run in [*published.resolved, *here.runs]:
        now = run_config(experiment, run).text(experiment.folder(run) / "config.yaml")
        write_text(out / "resolved" / f"{run}.yaml", published.resolved.get(run) or now)
    if (out / PILOTS).exists() and load(str(out / PILOTS)).root.exists():
        _write(_pilots(load(str(out / PILOTS))), out / "recipes.csv")


def _tables(merged: Experiment, runs: pd.DataFrame, out: Path) -> list[str]:
    """Make every table with a number, and the claims of these; returns what is not complete."""
    shutil.rmtree(out / "tables", ignore_errors=True)
    made, missing = {}, []
    shown = [shown_config(merged, name, figure=False) for name in tables(merged)]
    for one in shown:
        name, asked = one.name, (one.rows, one.evaluations, one.compare_with_paper, one.runs)
        made[name] = build_table(name, *asked)
        numbers = made[name].select_dtypes(float).filter(regex="(?<!_std)(?<!_paper)$")
        if numbers.notna().any(axis=None) and _can_tell(merged, name):
            _write(made[name], out / "tables" / f"{name}.csv")
        if not all(path.exists() for path in inputs_of_shown(merged, name, figure=False)):
            missing.append(f"{name}.csv")
    if merged.spec.compare_with_paper:
        config = claims_config(merged, "claims")
        made |= tables_of_runs(config.rows, config.runs)
        seeds = tables_of_seeds(shown, config.rows, config.runs)
        made[COST] = _cost(config.rows, runs)
        for own in seeds.values():
            del own[COST]
        sets, splits = tables_of_sets(shown), read_json(out / "images.json", {}).items()
        prefix = f"{merged.default_dataset} "
        images = {n.removeprefix(prefix): one["n"] for n, one in splits if n.startswith(prefix)}
        frame = claims_table(made, seeds=seeds, sets=sets, images=images)
        _write(frame, out / "claims.csv")
    return missing


def _cost(rows: list[Row], runs: pd.DataFrame) -> pd.DataFrame:
    """What training costs, by operations: hours are of several machines, which others shared."""
    lines = []
    for row in rows:
        total = operations_behind(row.runs, runs)
        first = operations_behind(row.runs, runs, only_first=True)
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
                draw(_with_split(shown_config(merged, name, figure=True), out, Path(folder)), new)
                _copy(new, out / "figures")
                shown[name] = [one for one, path in _read(merged, name).items() if path.exists()]
        elif (
            _is_newest(made, list(read.values()))
            and known >= {one for one, path in read.items() if path.exists()}
            and (name not in before or known >= read.keys())
        ):
            _copy(made, out / "figures")
            shown[name] = [one for one in read if one in known]
        elif name in before and to.exists():
            shown[name] = before[name]
    for path in (out / "figures").iterdir():
        if path.stem not in shown:
            path.unlink()
    return shown


def _with_split(shown: ShownConfig, out: Path, folder: Path) -> ShownConfig:
    """A figure that counts images of a split, from the published counts if the shards are gone."""
    if shown.classes is None or shown.classes.exists():
        return shown
    dataset, split = shown.classes.parts[-3:-1]
    about = read_json(out / "images.json", {}).get(f"{dataset} {split}", {})
    names = [str(number) for number in range(about.get("classes", 0))]
    index = folder / "index.json"
    write_record(index, {"n": about.get("n"), "class_names": names})
    return shown.model_copy(update={"classes": index})


def _read(experiment: Experiment, figure: str) -> dict[str, Path]:
    """The records and results that a figure reads, by run and by `RUN/EVALUATION`."""
    found = {}
    for path in inputs_of_shown(experiment, figure, figure=True):
        if path == RunRecord.path(path.parent):
            found[path.parent.name] = path
        elif experiment.root / "evaluations" in path.parents:
            found[f"{path.parent.name}/{path.stem}"] = path
    return found


def _can_tell(merged: Experiment, name: str) -> bool:
    """Whether a table or figure of cost has a measurement: recorded hours were disturbed."""
    evaluation = FIGURES[name].unless if name in FIGURES else ""
    return not evaluation or any(
        result_file(merged, (run, evaluation)).exists()
        for row in merged.rows(name)
        for run in row.runs
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
        for metric, value in flat(EvaluationRecord.read(path).metrics)
    ]


def _outcomes(results: dict[tuple[str, str], Path]) -> list[dict[str, Any]]:
    """Answers for every test image of the metrics in `PAIRED`, for tests of two encoders."""
    return [
        {"run": run, "evaluation": evaluation, "metric": metric} | kept[metric].model_dump()
        for (run, evaluation), path in results.items()
        if (kept := EvaluationRecord.read(path).outcomes)
        for metric in PAIRED.get(evaluation, ())
        if metric in kept
    ]


def _images(experiment: Experiment) -> dict[str, Any]:
    """Number and digest of the images of every split that is sharded."""
    found = {}
    for dataset, split in experiment.splits:
        index = seek_record(experiment.shards(dataset, split) / "index.json")
        if index:
            classes = len(index.get("class_names", ()))
            about = {"n": index["n"], "digest": index["digest"], "classes": classes}
            found[f"{dataset} {split}"] = about
    return found


def _write(
    lines: list[dict[str, Any]] | pd.DataFrame, path: Path, columns: list[str] | None = None
) -> None:
    write_text(path, pd.DataFrame(lines, columns=columns).to_csv(index=False, lineterminator="\n"))


def _runs(here: Here, published: Published) -> list[dict[str, Any]]:
    """What every run of the experiment is and, once it is finished, what it cost."""
    experiment, machine = here.experiment, _machine()
    lines: list[dict[str, Any]] = []
    for run in experiment.runs.values():
        if run.name in published.runs:
            lines.append(dict(published.runs[run.name]))
            continue
        record, log = here.runs.get(run.name), experiment.folder(run.name) / "metrics.jsonl"
        steps = entries(log) if record and log.exists() else []
        start: dict[str, Any] = {"step": 0, "epoch": 0.0, "timing": {"device_seconds": 0.0}}
        last = steps[-1] if steps else start
        images = last["step"] * getattr(run.settings, "batch_size", 0)
        lines.append(
            {
                "run": run.name,
                "stage": run.stage,
                "from": run.source or "",
                "seed": run.seed,
                "epochs": getattr(run.settings, "epochs", 0),
                "epochs_done": round(last["epoch"], 2),
                "finished": bool(record),
                "operations": float(f"{run.settings.flops_per_image(run.encoder) * images:.4g}"),
                "device_hours": round(last["timing"]["device_seconds"] / 3600, 3),
                "revision": ((record and record.source_revision) or "")[:12],
                "encoder_sha256": record.encoder_sha256 if record else "",
                "weights": weights(record) if record else "",
                "nnclr_loss": _first_nnclr_loss(run.name, experiment) if record else None,
                "lookups_right": _lookups_right(steps),
                "machine": machine + _bfloat16(record) if record else "",
            }
        )
    return lines


def _lookups_right(steps: list[dict[str, Any]]) -> float | None:
    """Percent of all lookups of a training whose neighbour was of the image's class."""
    known = [step["lookup_accuracy"] for step in steps if "lookup_accuracy" in step]
    return round(statistics.fmean(known), 2) if known else None


def _first_nnclr_loss(run: str, experiment: Experiment) -> float | None:
    """What the claims compare of a pre-training with an NNCLR head."""
    if experiment.runs[run].source is not None:
        return None
    frame = pretraining_table([Row("any", "any", (run,))], experiment.root / "runs")
    return None if frame.empty else float(frame["nnclr_loss"].iloc[0])


def _curves(experiment: Experiment, published: Published) -> list[dict[str, Any]]:
    """Loss and online evaluations of every run that has them."""
    lines: list[dict[str, Any]] = []
    for run in experiment.runs:
        if run in published.runs:
            lines += published.curves[run]
        elif (path := experiment.folder(run) / "metrics.jsonl").exists():
            lines += [{"run": run} | step for step in entries(path) if "online_rank_me" in step]
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
        knn = EvaluationRecord.read(path).metrics["knn"] if path.exists() else None
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
    """Return this machine, in a line: virtual machines hide a CPU's name, but not its model."""
    import torch

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    said = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    cores = text.count("\nprocessor") + text.startswith("processor")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cpu = said.get("model name") or platform.processor()
    if {"cpu family", "model"} <= said.keys():
        cpu += f", family {said['cpu family']} model {said['model']}"
    return (
        f"{cores} cores of {cpu} (accelerator: {device}), "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


BFLOAT16 = {"cpu": "bfloat16 on the CPU", "cuda": "bfloat16 on the GPU"}
"""How a run computed bfloat16, by what its record says."""


def _bfloat16(record: RunRecord) -> str:
    """Return how a run computed what its recipe asks to compute in bfloat16; "" if unknown."""
    kind = record.versions.get("bfloat16")
    return f", {BFLOAT16.get(kind, 'float32 for bfloat16')}" if kind else ""


def write_pages() -> None:
    """Write every results page, and the tables of the project's README."""
    for source in sorted(SOURCES.glob("*.md")):
        write_text(HERE / source.name, page(source))
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- (\w+) -->", text)
    for name in filter(lambda name: (HERE / name).is_dir(), shown):
        text = with_headline(text, name, headline(HERE / name))
    write_text(readme, text)


def main() -> None:
    """`collect NAME` or `pages`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("experiment")
    commands.add_parser("pages")
    options = parser.parse_args()
    if options.command == "collect":
        collect(options.experiment)
    else:
        write_pages()


if __name__ == "__main__":
    main()
