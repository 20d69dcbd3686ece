"""An experiment: which data, runs, evaluations and tables, from one YAML file, checked on reading.

Runs are written once and expanded: `ct_{aug}_{size}: {each: {aug: [min, aug], size: [...]}}`
gives a run for every combination. The `from` links are the edges of the pipeline.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from maect.core.errors import UserError
from maect.core.names import check_names
from maect.core.settings import one_line
from maect.evaluate import Protocol, evaluation_names, load_evaluation
from maect.experiment.expand import NAME, Run, expand_runs
from maect.experiment.rows import CHANGES, REPLACED, Line, lines, matching, restricted
from maect.experiment.schema import (
    ExperimentSpec,
    check_plain,
    expand_path,
    fill_path,
)
from maect.experiment.weights import from_scratch, missing_weights, without_twins
from maect.report.registry import FIGURES, TABLE_NAMES

EXPERIMENTS = Path("workflow/experiments")


class Experiment:
    """A validated experiment. Build it with `load`."""

    def __init__(self, name: str, spec: ExperimentSpec, file: Path, partial: bool = False) -> None:
        self.name = name
        self.spec = spec
        self.file = file
        self.partial = partial  # not all the evaluations that the file asks for
        self.datasets = spec.datasets
        self.default_dataset = next(iter(spec.datasets))
        # Runs of the same names: they must not replace those that began from scratch.
        apart = "-public" if spec.starting_from == "public" else ""
        storage = (spec.storage or f"results/{name}").rstrip("/") + apart
        self.root = Path(expand_path(storage, f"{file}: storage"))
        check_plain(f"{file}: name", name)
        check_plain(f"{file}: storage", str(self.root))
        self.runs: dict[str, Run] = expand_runs(spec, file)
        new = [name for name, changes in spec.protocols.items() if "protocol" in changes]
        self.evaluation_names = tuple(dict.fromkeys([*evaluation_names(), *new]))
        self._check_names("protocols", spec.protocols, self.evaluation_names)
        self.evaluations = tuple(dict.fromkeys(self._evaluations()))
        for evaluated, name in self.evaluations:
            self._check_evaluation(evaluated, name)
        self._check_names("tables", spec.tables, TABLE_NAMES)
        self._check_names("figures", spec.figures, FIGURES)
        self._rows = {
            name: lines(f"{file}: {kind}: {name}", rows, self.runs, self.evaluated, partial)
            for kind in ("tables", "figures")
            for name, rows in getattr(spec, kind).items()
        }
        trained = from_scratch(self.runs)
        if spec.starting_from == "public":
            self._leave_out(trained)
            for name in spec.tables:
                self._rows[name] = without_twins(self._rows[name], self.runs)
        # What imported weights cost is not known.
        shown = self._rows.get("gpu_hours", [])
        self._rows["gpu_hours"] = [line for line in shown if trained.issuperset(line[2])]

    def _leave_out(self, gone: set[str]) -> None:
        """Forget runs, their evaluations, and the lines that would be empty without them."""
        self.runs = {name: run for name, run in self.runs.items() if name not in gone}
        self.evaluations = tuple(pair for pair in self.evaluations if pair[0] not in gone)
        for name, rows in self._rows.items():
            left = [(s, m, [run for run in runs if run not in gone]) for s, m, runs in rows]
            self._rows[name] = [line for line in left if line[2]]

    def _error(self, message: str) -> UserError:
        return UserError(f"{self.file}: {message}")

    def _check_names(self, what: str, names: Any, known: Any) -> None:
        check_names(f"{self.file}: {what}", names, known)

    def evaluation(self, run: str, name: str) -> tuple[str, Protocol]:
        """Protocol and settings of an evaluation of a run."""
        return self._evaluation(self.runs[run].size, name)

    @cache  # noqa: B019 (an experiment lives as long as the process)
    def _evaluation(self, size: str, name: str) -> tuple[str, Protocol]:
        if not NAME.fullmatch(name):
            raise self._error(f"protocols: {name!r} is not a name (letters, digits, _ and -)")
        try:
            given = self.spec.protocols.get(name, {})
            filled = {k: fill_path(v) if isinstance(v, str) else v for k, v in given.items()}
            return load_evaluation(name, size, filled)
        except UserError as error:
            raise self._error(f"protocols: {error}") from None

    def _check_evaluation(self, run: str, name: str) -> None:
        splits = self.datasets[self.default_dataset].splits
        _, settings = self.evaluation(run, name)
        self._check_names(f"protocols: {name}: splits", settings.split_names, splits)
        for needed in settings.needs:
            if (run, needed) not in self.evaluations:
                raise self._error(f"evaluate: {name} of {run} reads what {needed} leaves; add it")

    def _evaluations(self) -> Iterator[tuple[str, str]]:
        for entry in self.spec.evaluate:
            self._check_names("evaluate: protocols", entry.protocols, self.evaluation_names)
            for pattern in entry.runs:
                found = matching(pattern, self.runs)
                if not found:
                    raise self._error(f"evaluate: no run is named {pattern!r}")
                yield from itertools.product(found, entry.protocols)

    @cached_property
    def protocols(self) -> dict[str, str]:
        """The protocol of each evaluation that is asked for, by the evaluation's name."""
        return {name: self.evaluation(run, name)[0] for run, name in self.evaluations}

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the runs that have any evaluation, in the file's order."""
        chosen = {run for run, _ in self.evaluations}
        return tuple(name for name in self.runs if name in chosen)

    def runs_of(self, stage: str) -> list[str]:
        """Names of the runs of a stage."""
        return [run.name for run in self.runs.values() if run.stage == stage]

    def shards(self, dataset: str, split: str) -> Path:
        """Folder of a split's shards."""
        return self.root / "shards" / dataset / split

    def images(self, dataset: str, split: str) -> Path:
        """Folder of a split's images; of a view, that of the shards that it shows a part of."""
        given = self.datasets[dataset].splits[split]
        if given.of is not None:
            return self.shards(dataset, given.of)
        if given.images is None:
            return self.root / "images" / dataset / split
        return Path(fill_path(given.images))

    def rows(self, name: str) -> list[Line]:
        """Lines of a table or figure."""
        return self._rows[name]

    @property
    def tables(self) -> list[str]:
        """Names of the tables that have any line, in the file's order."""
        return [name for name in self.spec.tables if self._rows[name]]

    @property
    def figures(self) -> list[str]:
        """Names of the figures that have any line, in the file's order."""
        return [name for name in self.spec.figures if self._rows[name]]

    def behind(self, runs: Iterable[str]) -> list[str]:
        """The runs and all that they start from, sorted."""
        found: set[str] = set()
        for run in runs:
            name: str | None = run
            while name is not None and name not in found:
                found.add(name)
                name = self.runs[name].source
        return sorted(found)

    def missing_images(self, splits: Iterable[tuple[str, str]] | None = None) -> list[str]:
        """What a real run would not find of the images: a sentence each, empty if all is there.

        Args:
            splits: (dataset, split) to look for; none: all.
        """
        known = [(name, split) for name, of in self.datasets.items() for split in of.splits]
        faults = []
        for name, split in known if splits is None else splits:
            given = self.datasets[name].splits[split]
            if (self.shards(name, split) / "index.json").exists():
                continue
            place = f"{self.file}: datasets: {name}"
            if given.images is not None and not self.images(name, split).exists():
                faults.append(
                    f"{place}: no images at {self.images(name, split)} (split {split}); "
                    "correct `images` there or put the images in place"
                )
            lost = [file for file in given.files() if not Path(file).exists()]
            faults += [f"{place}: no file {file} (split {split})" for file in lost]
        return faults

    def missing_weights(self, runs: Iterable[str] | None = None) -> list[str]:
        """Likewise, one sentence a file of weights that is to be imported, for runs or for all."""
        chosen = self.runs if runs is None else {name: self.runs[name] for name in runs}
        return [f"{self.file}: {fault}" for fault in missing_weights(chosen, self.root)]

    def missing_lists(self, evaluations: Iterable[tuple[str, str]]) -> list[str]:
        """Likewise, one sentence a folder of low-shot lists that evaluations of runs read."""
        given = [getattr(self.evaluation(*one)[1], "subsets", None) for one in evaluations]
        return [
            f"{self.file}: protocols: no folder {folder} of low-shot lists; "
            f"`maect retrieve low_shot_lists {folder}` brings them"
            for folder in sorted({f for f in given if isinstance(f, str)})
            if not Path(folder).expanduser().is_dir()
        ]


def load(name_or_path: str, **changes: Any) -> Experiment:
    """Read and validate an experiment, by name (`workflow/experiments/NAME.yaml`) or by path.

    Args:
        name_or_path: which.
        changes: what differs from the file, as `--config` gives it (`docs/experiments.md`).

    Raises:
        UserError: one message that names the file, the place and the cure.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = Path(__file__).parents[2] / EXPERIMENTS / f"{name_or_path}.yaml"
        if not path.exists():
            known = sorted(file.stem for file in path.parent.glob("*.yaml"))
            raise UserError(f"unknown experiment {name_or_path!r}; known: {', '.join(known)}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such experiment file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: an experiment is a mapping of keys to values")
    check_names("--config", changes, CHANGES)
    values |= {key: changes[key] for key in REPLACED if key in changes}
    try:
        spec = ExperimentSpec.model_validate(values)
    except ValidationError as error:
        raise one_line(error, str(path)) from None
    return Experiment(path.stem, restricted(spec, changes), path, "protocols" in changes)
