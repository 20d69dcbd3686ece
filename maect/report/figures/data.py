"""Inputs of figures: results by row, arrays, settings, names of classes, runs and their sources."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maect.core.errors import UserError, entry
from maect.core.files import read_record
from maect.records import RunRecord, checked_sha256, is_finished
from maect.report.configs import Row, ShownConfig, group_names, group_numbers
from maect.report.registry import FIGURES, architecture_title, method_title
from maect.report.tables import chain, result_file
from maect.stages import STAGES

WORDNET = re.compile(r"n\d{8}")
LEMMAS = "data/_info/imagenet_synset_to_lemma.txt"


def row_title(row: Row, rows: Sequence[Row]) -> str:
    """Return how a row is named in a figure: with its architecture where there are several."""
    method = method_title(row.method)
    if len({one.architecture for one in rows}) == 1:
        return method
    return f"{method}, {architecture_title(row.architecture)}"


def result_files(shown: ShownConfig) -> dict[str, Path]:
    """Return the files of arrays of each row's first run, by the row's title.

    Of the evaluations that the figure's entry needs, the first that any row has; a UserError if no
    row has one.
    """
    runs = {row_title(row, shown.rows): row.runs[0] for row in shown.rows if row.runs}
    needs = entry(shown.name, FIGURES, "figure").needs
    for name in needs:
        found = {
            title: result_file(shown.evaluations, run, name, ".safetensors")
            for title, run in runs.items()
        }
        files = {title: path for title, path in found.items() if path is not None}
        if files:
            return files
    raise UserError(f"{shown.name} figure: no run has the evaluation {' or '.join(needs)}")


def setting(result: Path, key: str) -> Any:
    """Read a setting of an evaluation from its result; None without a result."""
    return read_record(result).get("settings", {}).get(key) if result.exists() else None


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read named arrays of a safetensors file."""
    if not path.exists():
        raise UserError(f"{path}: no such file; run the {path.stem} evaluation first")
    checked_sha256(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UserError(f"{path}: has no `{missing[0]}`; run the {path.stem} evaluation again")
    return {name: tensors[name] for name in names}


@cache
def _lemmas() -> dict[str, str]:
    """Read words by WordNet id from the file that comes with timm, without importing timm."""
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    text = (Path(spec.submodule_search_locations[0]) / LEMMAS).read_text(encoding="utf-8")
    pairs = (line.split("\t") for line in text.splitlines() if "\t" in line)
    return {key: words.split(",")[0] for key, words in pairs}


def class_titles(names: Sequence[str]) -> list[str]:
    """Return printed names of classes: WordNet ids by their first word, others by folder."""
    if all(WORDNET.fullmatch(name) for name in names):
        return [_lemmas().get(name, name) for name in names]
    return [name.replace("_", " ") for name in names]


class Classes:
    """Names of class numbers, or of groups where these are shown; without an index the numbers."""

    def __init__(self, shown: ShownConfig) -> None:
        names = read_record(shown.classes)["class_names"] if shown.classes else []
        self._titles = class_titles(names)
        self._groups: np.ndarray | None = None
        if shown.groups is not None:
            self._titles = group_names(shown.groups)
            self._groups = np.array([*group_numbers(shown.groups, names, str(shown.classes)), -1])

    def __getitem__(self, number: int) -> str:
        known = 0 <= number < len(self._titles)
        return self._titles[number] if known else str(number)

    @property
    def are_groups(self) -> bool:
        """Return whether groups are shown."""
        return self._groups is not None

    def of(self, labels: np.ndarray) -> np.ndarray:
        """Return each label, or its group's number; -1: unknown, or none."""
        return labels if self._groups is None else self._groups[labels]


def stage_title(stage: str) -> str:
    """Return how a stage is printed."""
    if stage not in STAGES:
        return stage
    return STAGES[stage].title.format(run="").strip().removesuffix(" of")


def finished_runs(shown: ShownConfig) -> list[RunRecord]:
    """Return the rows' first finished runs and all they started from, sources first."""
    found: dict[str, RunRecord] = {}
    for row in shown.rows:
        for run in row.runs[:1]:
            if is_finished(shown.runs / run):
                found |= {record.run: record for record in reversed(chain(run, shown.runs))}
    return list(found.values())
