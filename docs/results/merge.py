"""Results and what was published of them before, in one folder like that of results.

Weights and features stay on the machine that made them, and are gone when that is; their numbers
are in CSV files. So an experiment may be computed in several sittings, on several machines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from maect.core.files import read_json, read_mapping, write_json, write_text
from maect.experiment import Experiment
from maect.experiment.resolve import evaluation_config, run_config
from maect.stages.run import RunConfig

LOOKS = ("look_knn", "look_rank_me", "look_uniformity", "look_alignment")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Published:
    """What the folder of a published experiment says that still counts."""

    runs: dict[str, dict[str, str]]
    """Lines of `runs.csv`, by run."""
    resolved: dict[str, str]
    """What each was told."""
    curves: dict[str, list[dict[str, str]]]
    """Lines of `curves.csv`, by run."""
    measured: dict[Pair, dict[str, str]]
    """Metrics of evaluations, by run and evaluation."""
    shown: dict[str, list[str]]
    """Trained runs that each figure shows, if none of them is another today."""
    refuted: list[str]
    """Runs that do not count any more."""


def counts(experiment: Experiment, folder: Path) -> Published:
    """What was published and is neither in the results folder nor refuted by it.

    A run counts if it was told what the experiment says today, if that holds for all that it
    started from, and if each of these that is in the results folder has the checksum that was
    published. An evaluation counts if its run does, or has that checksum, and if it was told the
    same. Nothing counts if the images are others.
    """
    lines = {line["run"]: line for line in _lines(folder / "runs.csv")}
    finished = [name for name, line in lines.items() if line["finished"] == "True"]
    other_images = _images_differ(experiment, folder)

    @cache
    def is_same(name: str) -> bool:
        """Whether a run is what was published, by its checksum or, not being here, by settings."""
        told = folder / "resolved" / f"{name}.yaml"
        if other_images or name not in finished or name not in experiment.runs:
            return False
        source = experiment.runs[name].source
        return (
            RunConfig.read(told).digest == run_config(experiment, name).digest
            and (lines[name]["from"] or None) == source
            and _checksum(experiment, name) in (None, lines[name]["encoder_sha256"])
            and (source is None or is_same(source))
        )

    runs = [name for name in finished if is_same(name) and _checksum(experiment, name) is None]
    settings = read_mapping(folder / "evaluations.json").get("settings", {})
    measured: dict[Pair, dict[str, str]] = {}
    for line in _lines(folder / "measured.csv"):
        pair = line["run"], line["evaluation"]
        known = pair in experiment.evaluations and is_same(pair[0])
        if not known or _result(experiment, pair).exists():
            continue
        if settings.get("/".join(pair)) == evaluation_config(experiment, *pair).digest:
            measured.setdefault(pair, {})[line["metric"]] = line["value"]
    curves = _lines(folder / "curves.csv")
    shown = read_mapping(folder / "figures.json")
    return Published(
        {name: lines[name] for name in runs},
        {name: (folder / "resolved" / f"{name}.yaml").read_text(encoding="utf-8") for name in runs},
        {name: [line for line in curves if line["run"] == name] for name in runs},
        measured,
        {figure: names for figure, names in shown.items() if all(map(is_same, names))},
        [name for name in finished if not is_same(name)],
    )


def merge(experiment: Experiment, published: Published, root: Path) -> None:
    """Fill an empty folder with records, curves and metrics of both."""
    for name in experiment.runs:
        folder = experiment.folder(name).absolute()
        to = root / "runs" / name
        if name in published.runs:
            _restore(name, published, to)
        elif folder.is_dir():
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(folder)
    for pair in experiment.evaluations:
        to = root / "evaluations" / pair[0] / f"{pair[1]}.json"
        if pair in published.measured:
            write_json(to, {"metrics": _nested(published.measured[pair])})
        elif _result(experiment, pair).exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(_result(experiment, pair).absolute())


def flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a mapping, also of lists and mappings in it, as `errors/0` and `hours/a/b`."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(one, int | float) for one in value):
        for number, one in enumerate(value):
            yield f"{name}/{number}", one
    elif isinstance(value, int | float):
        yield name, value


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
    line, told = published.runs[name], yaml.safe_load(published.resolved[name])
    hours = float(line["device_hours"])
    record = {
        "run": name,
        "stage": line["stage"],
        "source": line["from"] or None,
        "device_hours": hours,
        "recipe": told.get("settings", {}),
        "encoder": told.get("encoder", {}),
    }
    write_json(to / "run.json", record)
    steps: list[dict[str, Any]] = [
        {key: json.loads(value) for key, value in one.items() if key != "run" and value}
        for one in published.curves[name]
    ]
    if line.get("nnclr_loss"):
        steps.insert(0, {"step": 0, "epoch": 0.0, "loss_nnclr": float(line["nnclr_loss"])})
    write_text(to / "metrics.jsonl", "".join(f"{json.dumps(step)}\n" for step in steps))


def _images_differ(experiment: Experiment, folder: Path) -> bool:
    before = read_mapping(folder / "images.json")
    for dataset, split in experiment.splits:
        index = read_mapping(experiment.shards(dataset, split) / "index.json")
        known = before.get(f"{dataset} {split}")
        if index and known and index["digest"] != known["digest"]:
            return True
    return False


def _checksum(experiment: Experiment, name: str) -> str | None:
    """That of a run's encoder, None if the run is not finished here."""
    record = experiment.folder(name) / "run.json"
    if not record.exists():
        return None
    return str(read_json(record).get("sha256", {}).get("encoder.safetensors", ""))


def _result(experiment: Experiment, pair: Pair) -> Path:
    return experiment.root / "evaluations" / pair[0] / f"{pair[1]}.json"


def _lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file, as they are written."""
    if not path.exists():
        return []
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [{str(k): str(v) for k, v in line.items()} for line in frame.to_dict("records")]
