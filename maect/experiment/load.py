"""An experiment: which data, runs, evaluations and tables, from one YAML file, checked on reading.

Runs are written once and expanded: `ct_{aug}_{size}: {each: {aug: [min, aug], size: [...]}}`
gives a run for every combination. The `from` links are the edges of the pipeline.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from maect.core.errors import UserError, check_names, did_you_mean
from maect.core.files import PIPELINE, check_literal_path
from maect.core.settings import validated
from maect.core.yaml_files import read_mapping, read_yaml
from maect.data.changes import Changes, changes
from maect.data.config import ShardsConfig
from maect.data.sources.image_files import Unlabelled
from maect.evaluate import evaluation_names, load_evaluation
from maect.evaluate.base import Protocol
from maect.experiment import expand
from maect.experiment.chosen_shards import differing_settings, find_shards, shards_config
from maect.experiment.expand import Run, begins_with
from maect.experiment.schema import (
    ExperimentSpec,
    Split,
    check_name,
    check_plain,
    expand_path,
    fill_path,
)
from maect.recipes import Pixels
from maect.recipes.few_labels import FewLabels
from maect.recipes.settings import PLAIN, Computing, separate
from maect.records import lineage
from maect.report.configs import Row
from maect.report.registry import FIGURES, TABLE_NAMES, TABLES
from maect.stages import Training

EXPERIMENTS = PIPELINE / "workflow/experiments"
ON = ".on."
"""Separator of an evaluation's name and the data set's, unless it is the first data set."""
WITHOUT_NORM = ".before_norm"
"""Suffix after a split's name: its features before the encoder's final norm."""
LAST = ".last_"
"""Suffix after that, with a number N: outputs of the last N blocks, side by side."""


class Experiment:
    """A validated experiment. Build it with `load`.

    Attributes:
        runs: all runs by name, also those that evaluations ask for.
        evaluations: (run, name) of each, in the file's order.
        partial: whether fewer evaluations are asked for than the file says.
    """

    def __init__(self, name: str, spec: ExperimentSpec, file: Path, partial: bool = False) -> None:
        self.name = name
        self.spec = spec
        self.file = file
        self.partial = partial
        self.datasets = spec.datasets
        self.default_dataset = next(iter(spec.datasets))
        # Runs of the same names: they must not replace those that began from scratch.
        apart = "-public" if spec.starting_from == "public" else ""
        storage = (spec.storage or f"results/{name}").rstrip("/") + apart
        self.root = Path(expand_path(storage, f"{file}: storage"))
        self._check_plain()
        self.runs = expand.expand_runs(spec, file)
        for run in self.runs.values():
            self._check_names(f"runs: {run.name}: dataset", [run.dataset], spec.datasets)
            if run.settings.trains:
                self._check_resize(run.name, run.dataset)
        expand.check_sources(self.runs, f"{file}: runs")
        new = [name for name, changes in spec.protocols.items() if "protocol" in changes]
        known = tuple(dict.fromkeys([*evaluation_names(), *new]))
        self._check_names("protocols", spec.protocols, known)
        for entry in spec.evaluate:
            self._check_names("evaluate: protocols", entry.protocols, known)
            self._check_names("evaluate: datasets", entry.datasets, spec.datasets)
        for name in (name for name in spec.protocols if ON in name):
            raise self._error(f"protocols: {name}: {ON!r} is for data sets; choose another name")
        if "config" in spec.protocols:  # its stamp would be called `done`
            raise self._error("protocols: config: that is a run's file; choose another name")
        self.evaluations = self._add_runs_to_score()
        for evaluated, name in self.evaluations:
            self._check_evaluation(evaluated, name)
        self._check_names("tables", spec.tables, TABLE_NAMES)
        self._check_names("figures", spec.figures, FIGURES)
        self._rows = {
            name: expand.lines(f"{file}: {kind}: {name}", rows, self.runs, self.evaluated, partial)
            for kind in ("tables", "figures")
            for name, rows in getattr(spec, kind).items()
        }
        # What begins with a training, and not with imported weights.
        trained = {name for name in self.runs if begins_with(name, self.runs).settings.trains}
        if spec.starting_from == "public":
            if trained and len(trained) == len(self.runs):
                raise self._error(
                    "starting_from=public: no run names `public` weights to import "
                    "(docs/experiments.md); maect new-experiment --from-public writes one that does"
                )
            self._leave_out(trained)
            # Where the paper's one row mixes both, both stay.
            for name in (name for name in spec.tables if not TABLES[name].of_public):
                self._rows[name] = expand.without_twins(self._rows[name], self.runs)
        for name in spec.figures:
            figure = FIGURES[name]
            rows = self._rows[name]
            measured = any(
                (run, figure.unless) in self.evaluations for row in rows for run in row.runs
            )
            if figure.trained_here and not measured:
                self._rows[name] = [row for row in rows if trained.issuperset(row.runs)]

        for run in self.runs.values():
            if run.settings.trains:
                where = f"runs: {run.name}: datasets: {run.dataset}: splits"
                self._check_names(where, [run.split], self.datasets[run.dataset].splits)

    def _check_plain(self) -> None:
        """Refuse names that commands could not say without quotes."""
        check_plain(f"{self.file}: name", self.name)
        check_literal_path(self.root)
        check_plain(f"{self.file}: storage", str(self.root))
        for name, dataset in self.datasets.items():
            check_name(f"{self.file}: datasets", name)
            for split in dataset.splits:
                check_name(f"{self.file}: datasets: {name}: splits", split)
                for suffix in (WITHOUT_NORM, LAST):
                    if suffix in f"{name}-{split}":
                        raise self._error(
                            f"datasets: {name}: splits: {split}: {suffix!r} is for features; "
                            "choose another name"
                        )
        first: dict[str, str] = {}
        for name, split in self.splits:
            called = f"{name}-{split}"
            this = f"{name}: {split}"
            if (other := first.setdefault(called, this)) != this:
                raise self._error(
                    f"datasets: features of {other} and of {this} would both be called {called}; "
                    "rename one of them"
                )

    def _add_runs_to_score(self) -> tuple[tuple[str, str], ...]:
        """Add the trainings that evaluations need to the runs; return all evaluations."""
        asked = tuple(dict.fromkeys(self._asked(self.runs)))
        given = [
            (run, e, self.evaluation(run, e), self._computing(e), self.dataset_of(e))
            for run, e in asked
        ]
        more = expand.runs_to_score(self.runs, given)
        twice = sorted(set(more) & set(self.runs))
        if twice:
            raise self._error(
                f"runs: {twice[0]}: an evaluation trains a run of this name; choose another"
            )
        self.runs |= more
        expand.check_sources(self.runs, f"{self.file}: evaluate")
        # These can be evaluated as well, each by its full name.
        asked = tuple(dict.fromkeys(self._asked(self.runs, complete=True)))
        for run, name in asked:
            if self.runs[run].scored_by and self.evaluation(run, name).trainings():
                raise self._error(f"evaluate: {name} of {run}, which is fine-tuned already")
        return asked

    def _asked(self, runs: Mapping[str, Run], complete: bool = False) -> Iterator[tuple[str, str]]:
        for entry in self.spec.evaluate:
            for pattern in entry.runs:
                names = expand.matching(pattern, runs)
                later = self.partial and expand.may_be_scored(pattern, runs)
                if complete and not names and not later:
                    raise self._error(f"evaluate: no run is named {pattern!r}")
                few = [run for run in names if entry.seeds is None or runs[run].seed < entry.seeds]
                datasets = entry.datasets or [self.default_dataset]
                asked = [
                    self.evaluation_name(name, d) for d in datasets for name in entry.protocols
                ]
                yield from itertools.product(few, asked)

    def evaluation_name(self, name: str, dataset: str) -> str:
        """Return the name of an evaluation of a data set: NAME of the first, NAME.on.DATASET."""
        return name if dataset == self.default_dataset else f"{name}{ON}{dataset}"

    def dataset_of(self, evaluation: str) -> str:
        """Return the data set that an evaluation is of, by its name."""
        return evaluation.partition(ON)[2] or self.default_dataset

    def _leave_out(self, gone: set[str]) -> None:
        """Forget runs, their evaluations, and the lines that would be empty without them."""
        self.runs = {name: run for name, run in self.runs.items() if name not in gone}
        self.evaluations = tuple(pair for pair in self.evaluations if pair[0] not in gone)
        for name, rows in self._rows.items():
            left = [replace(row, runs=tuple(r for r in row.runs if r not in gone)) for row in rows]
            self._rows[name] = [row for row in left if row.runs]

    def _error(self, message: str) -> UserError:
        return UserError(f"{self.file}: {message}")

    def _check_names(self, what: str, names: Iterable[str], known: Iterable[str]) -> None:
        check_names(f"{self.file}: {what}", names, known)

    @cache  # noqa: B019 (an experiment lives as long as the process)
    def evaluation(self, run: str, name: str) -> Protocol:
        """Return the settings of an evaluation of a run."""
        return self._evaluation(self.runs[run].size, name.partition(ON)[0])

    @cache  # noqa: B019
    def _evaluation(self, size: str, name: str) -> Protocol:
        check_name(f"{self.file}: protocols", name)
        try:
            given, _ = separate(self.spec.protocols.get(name, {}))
            known = {k: fill_path(v) if isinstance(v, str) else v for k, v in given.items()}
            settings = load_evaluation(name, size, known)[1]
        except UserError as error:
            raise self._error(f"protocols: {error}") from None
        return settings.read_lists() if isinstance(settings, FewLabels) else settings

    def _computing(self, evaluation: str) -> Computing:
        """Return how the runs are trained that an evaluation asks for."""
        name = evaluation.partition(ON)[0]
        _, how = separate(self.spec.protocols.get(name, {}))
        return validated(Computing, how, f"{self.file}: protocols: {name}")

    def _check_evaluation(self, run: str, name: str) -> None:
        dataset = self.dataset_of(name)
        computing = self._computing(name)
        trainings = self.evaluation(run, name).trainings().values()
        try:
            for stage, _ in trainings:
                cast(Training, stage).check_computing(computing)
        except ValueError as error:
            raise self._error(f"protocols: {name}: {error}") from None
        if computing != PLAIN and not trainings:
            raise self._error(f"protocols: {name} trains no run: {computing.changes(PLAIN)}")
        made = self.runs[run].encoder.pixels.channels
        given = self.datasets[dataset].pixels.channels
        if made != given:
            raise self._error(
                f"evaluate: {run} is trained on images of {made} channels, and "
                f"{dataset}, which it is evaluated on, has {given}"
            )
        self._check_resize(run, dataset)
        splits = self.datasets[dataset].splits
        settings = self.evaluation(run, name)
        self._check_names(f"protocols: {name}: splits", settings.split_names, splits)
        for split in settings.split_names or (settings.train_split, settings.test_split):
            if settings.labelled and split in splits and splits[split].source is Unlabelled:
                raise self._error(
                    f"evaluate: {name} of {run} needs labels, and {dataset} {split} has none "
                    "(kind: unlabelled); leave it out, or sort the images into class folders"
                )
        for needed in settings.needs:
            if (run, self.evaluation_name(needed, dataset)) not in self.asked:
                raise self._error(f"evaluate: {name} of {run} reads the output of {needed}; add it")

    def _check_resize(self, run: str, dataset: str) -> None:
        given = self.datasets[dataset].resize
        side = self.runs[run].encoder.image_size
        if given is not None and given < side:
            raise self._error(
                f"datasets: {dataset}: resize {given} is smaller than the {side} pixels that "
                f"{run} is given; make it {side} or more, or leave it out"
            )

    @cached_property
    def asked(self) -> frozenset[tuple[str, str]]:
        """The evaluations, to look one up."""
        return frozenset(self.evaluations)

    @cached_property
    def protocols(self) -> dict[str, str]:
        """The protocol of each evaluation that is asked for, by the evaluation's name."""
        return {name: self.evaluation(run, name).name for run, name in self.evaluations}

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the runs that have any evaluation, in the file's order."""
        chosen = {run for run, _ in self.evaluations}
        return tuple(name for name in self.runs if name in chosen)

    @property
    def splits(self) -> list[tuple[str, str]]:
        """(dataset, split) of all splits."""
        return [(name, split) for name, of in self.datasets.items() for split in of.splits]

    @cache  # noqa: B019
    def runs_of(self, stage: str) -> list[str]:
        """Names of the runs of a stage."""
        return [run.name for run in self.runs.values() if run.stage == stage]

    def folder(self, run: str) -> Path:
        """Folder of a run."""
        return self.root / "runs" / run

    @cache  # noqa: B019
    def shards(self, dataset: str, split: str) -> Path:
        """Return the folder of a split's shards: its own, or one of another experiment."""
        given = self._given(dataset, split)
        return find_shards(self.own_shards(dataset, split), *given, self.images(dataset, split))

    def own_shards(self, dataset: str, split: str) -> Path:
        """Return where a split's shards are if no other experiment has them."""
        return self.root / "shards" / dataset / split

    def shards_config(self, dataset: str, split: str) -> ShardsConfig:
        """Return the resolved settings of a split's shards."""
        return shards_config(*self._given(dataset, split), self.images(dataset, split))

    def differing_settings(self, dataset: str, split: str) -> str:
        """Return where the file is not what a split's shards were made by; empty: nowhere."""
        return differing_settings(self.shards(dataset, split), *self._given(dataset, split))

    def _given(self, dataset: str, split: str) -> tuple[Split, Pixels]:
        return self.datasets[dataset].splits[split], self.datasets[dataset].pixels

    @cache  # noqa: B019
    def changes(self, dataset: str, split: str) -> Changes | None:
        """Return how the images of a split differ from those in its shards."""
        return changes(self.shards(dataset, split), self.images(dataset, split))

    def images(self, dataset: str, split: str) -> Path:
        """Return the folder of a split's images; of a view, that of the shards it selects from."""
        given = self.datasets[dataset].splits[split]
        if given.of is not None:
            return self.shards(dataset, given.of)
        if given.images is None:
            return self.root / "images" / dataset / split
        return Path(fill_path(given.images))

    def other_kind(self, dataset: str) -> str:
        """Return the kind of the bundled images that were written, if it is not that asked for."""
        asked = self.datasets[dataset]
        path = self.root / "images" / dataset / "kind.txt"
        written = path.read_text().strip() if asked.bundled and path.exists() else asked.kind
        return written if written != asked.kind else ""

    def rows(self, name: str) -> list[Row]:
        """Return the lines of a table or figure."""
        return self._rows[name]

    @property
    def tables(self) -> list[str]:
        """Return the names of the tables that have any line, in the file's order."""
        return [name for name in self.spec.tables if self._rows[name]]

    @property
    def figures(self) -> list[str]:
        """Names of the figures that have any line, in the file's order."""
        return [name for name in self.spec.figures if self._rows[name]]

    def with_ancestors(self, runs: Iterable[str]) -> list[str]:
        """Return the runs and all that they start from, sorted."""
        return sorted({one.name for run in runs for one in lineage(run, self.runs.get)})


def names() -> list[str]:
    """Experiments that come with the pipeline."""
    return sorted(file.stem for file in EXPERIMENTS.glob("*.yaml"))


def own_experiments(folder: Path) -> list[Path]:
    """Return the experiments in a folder: YAML files that have data sets and runs."""
    found = []
    for file in sorted(folder.glob("*.y*ml")):
        try:
            keys = read_mapping(file, "experiment").keys()
        except (UserError, OSError):
            continue
        if {"datasets", "runs"} <= keys:
            found.append(file)
    return found


def load(name_or_path: str, **changes: Any) -> Experiment:
    """Read and validate an experiment, by name (`workflow/experiments/NAME.yaml`) or by path.

    `changes` differ from the file, as `--config` gives them (`docs/experiments.md`).

    Raises:
        UserError: one message that names the file, the key and the hint.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = EXPERIMENTS / f"{name_or_path}.yaml"
        if not path.exists():
            hint = did_you_mean(name_or_path, names())
            raise UserError(f"unknown experiment {name_or_path!r}; {hint}")
    values = read_mapping(path, "experiment")
    check_names("--config", changes, expand.CHANGES)
    values |= {key: changes[key] for key in expand.REPLACED if key in changes}
    where = str(path)
    if "splits" in changes:
        values["datasets"] = _with_splits(
            values.get("datasets"), Path(fill_path(str(changes["splits"])))
        )
        where += f" with {changes['splits']}"
    spec = validated(ExperimentSpec, values, where)
    return Experiment(path.stem, expand.restricted(spec, changes), path, "protocols" in changes)


def _with_splits(datasets: Any, file: Path) -> Any:
    """Replace the splits of data sets by those of a file of `DATASET: {SPLIT: ...}`."""
    try:
        given = read_yaml(file)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file of splits") from None
    if not isinstance(datasets, dict):
        return datasets  # what is wrong with these is said when they are read
    if not isinstance(given, dict) or not all(isinstance(of, dict) for of in given.values()):
        raise UserError(f"{file}: write DATASET: {{SPLIT: {{images: ..., kind: ...}}}}")
    check_names(f"{file}: data sets", given, datasets)
    new = dict(datasets)
    for name, splits in given.items():
        known = datasets[name].get("splits") if isinstance(datasets[name], dict) else None
        if isinstance(known, dict):
            check_names(f"{file}: {name}: splits", splits, known)
            new[name] = datasets[name] | {"splits": known | splits}
    return new
