"""Results and what was published of them before, in one folder like that of results.

Weights and features stay on the machine that made them, and are gone when that is; their numbers
are in CSV files. So an experiment may be computed in several sittings, on several machines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from maect.core.errors import UserError
from maect.core.files import read_json, seek_record, write_text
from maect.core.settings import digest
from maect.evaluate.base import OutputOf, Trained
from maect.experiment import Experiment
from maect.experiment.resolve import evaluation_config, input_path, is_current, run_config
from maect.records import EvaluationRecord, Outcome, RunRecord, line_of
from maect.stages.run import RunConfig

Pair = tuple[str, str]


@dataclass(frozen=True)
class Published:
    """What the folder of a published experiment says that still counts and is not here."""

    runs: dict[str, dict[str, str]]
    """Lines of `runs.csv`, by run."""
    resolved: dict[str, str]
    """Config of each."""
    curves: dict[str, list[dict[str, str]]]
    """Lines of `curves.csv`, by run."""
    measured: dict[Pair, dict[str, str]]
    """Metrics of evaluations, by run and evaluation."""
    outcomes: dict[Pair, dict[str, Outcome]]
    """Of single test images, by run and evaluation."""
    results: dict[str, dict[str, str]]
    """Of these, as `RUN/EVALUATION`, digests of their settings and of what they left."""
    shown: dict[str, list[str]]
    """Runs and results that each figure shows, if none of them is another today."""
    refuted: list[str]
    """Runs and results that do not count any more."""


@dataclass(frozen=True)
class Here:
    """What of the results folder is what the experiment asks for today."""

    experiment: Experiment
    runs: dict[str, RunRecord]
    """Completion records, by run."""
    results: dict[Pair, EvaluationRecord]
    """Results, by run and evaluation."""


def what_is_here(experiment: Experiment) -> Here:
    """Runs and results of this machine that count.

    A run or a result counts if its stamp is current (`maect.core.stamps`) and so are those of all
    that it was made from.
    """

    @cache
    def record(name: str) -> RunRecord | None:
        """A run's completion record; none if the run does not count."""
        found, source = RunRecord.find(experiment.folder(name)), experiment.runs[name].source
        path = experiment.folder(name) / "config.yaml"
        if not found or not is_current(experiment, path, run_config(experiment, name)):
            return None
        if source and not record(source):
            return None
        return found

    @cache
    def result(pair: Pair) -> EvaluationRecord | None:
        """An evaluation's result; none if it does not count."""
        found, made_by = EvaluationRecord.seek(result_file(experiment, pair)), record(pair[0])
        config = evaluation_config(experiment, *pair)
        path = result_file(experiment, pair).with_suffix(".yaml")
        if not found or not made_by or not is_current(experiment, path, config):
            return None
        for kind in config.settings.inputs().values():
            if isinstance(kind, OutputOf) and not result((pair[0], kind.evaluation)):
                return None
            if isinstance(kind, Trained):
                folders = cast(list[Path], input_path(experiment, *pair, kind))
                if not all(record(folder.name) for folder in folders):
                    return None
        return found

    return Here(
        experiment,
        {name: one for name in experiment.runs if (one := record(name))},
        {pair: got for pair in experiment.evaluations if (got := result(pair))},
    )


def counts(here: Here, folder: Path) -> Published:
    """What was published and is neither here nor refuted by what is.

    A run counts if its config is what the experiment says today, if that holds for all that it
    started from, and if each of these that is here has the checksum that was published. A result
    counts if its run does, or has that checksum, if its config is the same, and if that holds for
    the runs and results that it was made from. Nothing counts if the images are others.
    """
    experiment = here.experiment
    lines = {line["run"]: line for line in _lines(folder / "runs.csv")}
    finished = [name for name, line in lines.items() if line["finished"] == "True"]
    results = read_json(folder / "evaluations.json", {}).get("results", {})
    other_images = _images_differ(experiment, folder)

    @cache
    def is_run(name: str) -> bool:
        """Whether a run is what was published, by its checksum or, not being here, by settings."""
        if other_images or name not in finished or name not in experiment.runs:
            return False
        try:
            config = RunConfig.read(folder / "resolved" / f"{name}.yaml")
        except UserError:  # of a version with other settings
            return False
        source, line = experiment.runs[name].source, lines[name]
        again = here.runs.get(name)
        return (
            config.digest == run_config(experiment, name).digest
            and (line["from"] or None) == source
            and (again is None or again.encoder_sha256 == line["encoder_sha256"])
            and (again is None or line.get("weights") in ("", None, weights(again)))
            and (source is None or is_run(source))
        )

    @cache
    def is_result(pair: Pair) -> bool:
        """Likewise a result, by what it left where it is here."""
        known = results.get("/".join(pair))
        if known is None or pair not in experiment.evaluations or not is_run(pair[0]):
            return False
        now = evaluation_config(experiment, *pair)
        of_runs = [
            is_run(run.name)
            for kind in now.settings.inputs().values()
            if isinstance(kind, Trained)
            for run in cast(list[Path], input_path(experiment, *pair, kind))
        ]
        again = here.results.get(pair)
        return (
            known["settings"] == now.digest
            and (again is None or (bool(known["left"]) and known["left"] == again.left_sha256))
            and all(of_runs)
            and all(is_result((pair[0], need)) for need in now.settings.needs)
        )

    def is_same(name: str) -> bool:
        run, _, evaluation = name.partition("/")
        return is_result((run, evaluation)) if evaluation else is_run(run)

    runs = [name for name in finished if is_run(name) and name not in here.runs]
    made = [p for p in experiment.evaluations if is_result(p) and p not in here.results]
    measured: dict[Pair, dict[str, str]] = {pair: {} for pair in made}
    for line in _lines(folder / "measured.csv"):
        if (pair := (line["run"], line["evaluation"])) in measured:
            measured[pair][line["metric"]] = line["value"]
    outcomes: dict[Pair, dict[str, Outcome]] = {}
    for line in _lines(folder / "outcomes.csv"):
        if (pair := (line.pop("run"), line.pop("evaluation"))) in measured:
            outcomes.setdefault(pair, {})[line.pop("metric")] = Outcome.model_validate(line)
    curves = _lines(folder / "curves.csv")
    shown = read_json(folder / "figures.json", {})
    replaced = {"/".join(pair) for pair in here.results} | here.runs.keys()
    return Published(
        {name: lines[name] for name in runs},
        {name: (folder / "resolved" / f"{name}.yaml").read_text(encoding="utf-8") for name in runs},
        {name: [line for line in curves if line["run"] == name] for name in runs},
        measured,
        outcomes,
        {name: results[name] for name in map("/".join, made)},
        {figure: names for figure, names in shown.items() if all(map(is_same, names))},
        [name for name in (*finished, *results) if name not in replaced and not is_same(name)],
    )


def merge(here: Here, published: Published, root: Path) -> None:
    """Fill an empty folder with records, curves and metrics of both."""
    experiment = here.experiment
    for name in experiment.runs:
        folder, to = experiment.folder(name).absolute(), root / "runs" / name
        if name in published.runs:
            _restore(name, published, to)
        elif name in here.runs:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(folder)
    for pair in experiment.evaluations:
        to = root / "evaluations" / pair[0] / f"{pair[1]}.json"
        if pair in published.measured:
            metrics = _nested(published.measured[pair])
            EvaluationRecord(metrics=metrics, outcomes=published.outcomes.get(pair)).write(to)
        elif pair in here.results:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(result_file(experiment, pair).absolute())


def weights(record: RunRecord) -> str:
    """Digest of all that a run left: a head's encoder is that of its source."""
    return digest(record.sha256)


def result_file(experiment: Experiment, pair: Pair) -> Path:
    """The JSON of an evaluation."""
    return experiment.root / "evaluations" / pair[0] / f"{pair[1]}.json"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a mapping, also of lists and mappings in it, as `errors/0` and `hours/a/b`."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list) and all(map(_is_number, value)):
        for number, one in enumerate(value):
            yield f"{name}/{number}", one
    elif _is_number(value):
        yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nested(numbers: dict[str, str]) -> Any:
    """What `flat` made flat."""
    made: dict[str, Any] = {}
    for name, value in numbers.items():
        *outer, last = name.split("/")
        inside = made
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = json.loads(value)
    return _with_lists(made)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return list(value.values())
    return {key: _with_lists(one) for key, one in value.items()}


def _restore(name: str, published: Published, to: Path) -> None:
    """A completion record and curves, as far as tables and figures of numbers read them."""
    line, config = published.runs[name], yaml.safe_load(published.resolved[name])
    RunRecord(
        run=name,
        stage=line["stage"],
        source=line["from"] or None,
        device_hours=float(line["device_hours"]),
        settings=config.get("settings", {}),
        encoder=config.get("encoder"),
    ).write(RunRecord.path(to))
    steps: list[dict[str, Any]] = [
        {key: json.loads(value) for key, value in one.items() if key != "run" and value}
        for one in published.curves[name]
    ]
    if line.get("nnclr_loss"):
        steps.insert(0, {"step": 0, "epoch": 0.0, "loss_nnclr": float(line["nnclr_loss"])})
    log = (line_of(step.pop("step"), step, {"device_seconds": 0.0}) for step in steps)
    if steps:
        write_text(to / "metrics.jsonl", "".join(log))


def _images_differ(experiment: Experiment, folder: Path) -> bool:
    before = read_json(folder / "images.json", {})
    for dataset, split in experiment.splits:
        index = seek_record(experiment.shards(dataset, split) / "index.json")
        known = before.get(f"{dataset} {split}")
        if index and known and index["digest"] != known["digest"]:
            return True
    return False


def _lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file, as they are written."""
    if not path.exists() or not path.read_text(encoding="utf-8").strip():
        return []
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [{str(k): str(v) for k, v in line.items()} for line in frame.to_dict("records")]
