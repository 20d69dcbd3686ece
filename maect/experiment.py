"""An experiment: which data, runs, evaluations and tables, from one YAML file, checked on reading.

Runs are written once and expanded: `ct_{aug}_{size}: {each: {aug: [min, aug], size: [...]}}`
gives a run for every combination. The `from` links are the edges of the pipeline.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from maect.errors import UserError
from maect.experiment_file import (
    FIGURES,
    TABLES,
    ExperimentSpec,
    RunSpec,
    expand_path,
    fill_path,
    fill_values,
    flatten,
    yaml_scalar,
)
from maect.experiment_rows import CHANGES, REPLACED, Line, check_names, lines, matching, restricted
from maect.experiment_weights import missing_weights, shared_by_seeds
from maect.recipes import (
    Encoder,
    Import,
    Protocol,
    Stage,
    Tune,
    digest,
    evaluation_names,
    load_encoder,
    load_evaluation,
    load_import,
    load_recipe,
    one_line,
)

EXPERIMENTS = Path("workflow/experiments")
STAGE_NAMES = {"Pretrain": "pretrain", "Head": "head", "Tune": "tune", "Import": "import"}
# What may start from what; the value None means "from nothing".
SOURCES = {
    "pretrain": (None,),
    "import": (None,),
    "head": ("pretrain", "import", "tune"),
    "tune": ("head", "pretrain", "import"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Run:
    """One stage with its resolved settings."""

    name: str
    stage: str
    recipe: str | None
    size: str
    method: str
    settings: Stage | Import
    encoder: Encoder
    dataset: str
    seed: int
    source: str | None
    arguments: tuple[str, ...] = field(repr=False)
    """How the command line says the same: recipe, size and overrides."""
    weights: Path | None = None
    """The checkpoint that is imported, if any; its place is no part of the run's identity."""

    @property
    def leaves_head(self) -> bool:
        """Whether `head.safetensors` is among what this run leaves."""
        return getattr(self.settings, "head", None) is not None

    @property
    def digest(self) -> str:
        """Identity of what this run is told; what it starts from is not part of it."""
        return digest(self.stage, self.settings, self.encoder, self.seed)


class Experiment:
    """A validated experiment. Build it with `load`."""

    def __init__(self, name: str, spec: ExperimentSpec, file: Path) -> None:
        self.name = name
        self.spec = spec
        self.file = file
        self.datasets = spec.datasets
        self.default_dataset = next(iter(spec.datasets))
        self.root = Path(expand_path(spec.storage or f"results/{name}", f"{file}: storage"))
        self.runs = self._expand()
        for run in self.runs.values():
            self._check_source(run)
        self._check_order()
        new = [name for name, changes in spec.protocols.items() if "protocol" in changes]
        self.evaluation_names = tuple(dict.fromkeys([*evaluation_names(), *new]))
        self._check_names("protocols", spec.protocols, self.evaluation_names)
        self.evaluations = tuple(dict.fromkeys(self._evaluations()))
        for evaluated, name in self.evaluations:
            self._check_evaluation(evaluated, name)
        self._check_names("tables", spec.tables, TABLES)
        self._check_names("figures", spec.figures, FIGURES)
        self._rows = {
            name: lines(f"{file}: {kind}: {name}", rows, self.runs, self.evaluated)
            for kind in ("tables", "figures")
            for name, rows in getattr(spec, kind).items()
        }

    def _error(self, message: str) -> UserError:
        return UserError(f"{self.file}: {message}")

    def _check_names(self, what: str, names: Any, known: Any) -> None:
        check_names(f"{self.file}: {what}", names, known)

    def _expand(self) -> dict[str, Run]:
        runs: dict[str, Run] = {}
        for template, spec in self.spec.runs.items():
            for values in itertools.product(*spec.each.values()):
                chosen = dict(zip(spec.each, map(str, values), strict=True))
                for seed in range(self.spec.seeds if spec.weights is None else 1):
                    run = self._run(template, spec, chosen, seed)
                    if run.name in runs:
                        raise self._error(f"runs: {run.name} is defined twice")
                    runs[run.name] = run
        return shared_by_seeds(runs)

    def _run(self, template: str, spec: RunSpec, chosen: dict[str, str], seed: int) -> Run:
        def fill(text: str) -> str:
            try:
                return text.format_map(chosen)
            except (KeyError, ValueError, IndexError) as error:
                raise self._error(f"runs: {template}: {text!r}: {error} is not in `each`") from None

        base, size, recipe = fill(template), fill(spec.size), fill(spec.recipe or "")
        layout = fill(spec.layout) if spec.layout else None
        if not NAME.fullmatch(base):
            raise self._error(f"runs: {base!r} is not a name (letters, digits, _ and -)")
        suffix = f"-s{seed}" if seed else ""
        overrides = yaml.safe_load(fill_values(spec.overrides, fill))
        settings: Stage | Import
        try:
            if recipe:
                settings = load_recipe(recipe, size, overrides)
                encoder = load_encoder(size, spec.image_size)
                arguments = ["--recipe", recipe, "--size", size, "--seed", str(seed)]
            else:
                settings, encoder = load_import(layout, size, spec.image_size)
                arguments = ["--size", size, *(["--layout", layout] if layout else [])]
        except UserError as error:
            raise self._error(f"runs: {base}: {error}") from None
        if isinstance(settings, Tune) and settings.frozen_blocks >= encoder.depth:
            raise self._error(
                f"runs: {base}: frozen_blocks {settings.frozen_blocks} leaves none of the "
                f"{encoder.depth} blocks to tune"
            )
        if spec.image_size is not None:
            arguments += ["--image-size", str(spec.image_size)]
        for key, value in flatten(overrides):
            arguments += ["--set", f"{key}={yaml_scalar(value)}"]
        return Run(
            name=base + suffix,
            stage=STAGE_NAMES[type(settings).__name__],
            recipe=recipe or None,
            size=size,
            method=fill(spec.method) if spec.method else re.sub(rf"_{size}(?=_|$)", "", base),
            settings=settings,
            encoder=encoder,
            dataset=spec.dataset or self.default_dataset,
            seed=seed,
            source=fill(spec.source) + suffix if spec.source else None,
            arguments=tuple(arguments),
            weights=Path(fill_path(fill(spec.weights))) if spec.weights else None,
        )

    def _check_source(self, run: Run) -> None:
        place = f"runs: {run.name}"
        self._check_names(f"{place}: dataset", [run.dataset], self.datasets)
        if run.source is None:
            if None not in SOURCES[run.stage]:
                raise self._error(f"{place}: stage {run.stage} needs `from`: a run to start from")
            return
        if run.source not in self.runs:
            near = difflib.get_close_matches(run.source, list(self.runs), n=1)
            cure = f"; did you mean {near[0]!r}?" if near else ""
            raise self._error(f"{place}: starts from unknown run {run.source!r}{cure}")
        source = self.runs[run.source]
        if source.stage not in SOURCES[run.stage]:
            allowed = " or ".join(str(s) for s in SOURCES[run.stage] if s) or "nothing"
            raise self._error(
                f"{place}: stage {run.stage} starts from {allowed}, "
                f"but {source.name} is a {source.stage} run"
            )
        if source.encoder != run.encoder:
            raise self._error(f"{place}: its encoder differs from that of {source.name}")
        ours = getattr(run.settings, "head", None)
        theirs = getattr(source.settings, "head", None)
        if run.stage == "tune" and theirs is not None:
            for key in ("queue_size", "projector_hidden", "predictor_hidden", "embedding"):
                if getattr(ours, key) != getattr(theirs, key):
                    raise self._error(
                        f"{place}: head.{key} {getattr(ours, key)} differs from "
                        f"{getattr(theirs, key)} of {source.name}"
                    )

    def _check_order(self) -> None:
        for run in self.runs.values():
            seen: list[str] = []
            name: str | None = run.name
            while name is not None:
                if name in seen:
                    raise self._error(f"runs: {' <- '.join([*seen, name])} is a circle")
                seen.append(name)
                name = self.runs[name].source

    def evaluation(self, run: str, name: str) -> tuple[str, Protocol]:
        """Protocol and settings of an evaluation of a run."""
        return self._evaluation(self.runs[run].size, name)

    @cache  # noqa: B019 (an experiment lives as long as the process)
    def _evaluation(self, size: str, name: str) -> tuple[str, Protocol]:
        if not NAME.fullmatch(name):
            raise self._error(f"protocols: {name!r} is not a name (letters, digits, _ and -)")
        try:
            return load_evaluation(name, size, self.spec.protocols.get(name))
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

    @cached_property
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

    def behind(self, runs: Iterable[str]) -> list[str]:
        """The runs and all that they start from, sorted."""
        found: set[str] = set()
        for run in runs:
            name: str | None = run
            while name is not None and name not in found:
                found.add(name)
                name = self.runs[name].source
        return sorted(found)

    def missing_images(self) -> list[str]:
        """What a real run would not find: one sentence a split, empty if all is there."""
        faults = []
        for name, dataset in self.datasets.items():
            for split, given in dataset.splits.items():
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

    def missing_weights(self) -> list[str]:
        """Likewise, one sentence a file of weights that is to be imported."""
        return [f"{self.file}: {fault}" for fault in missing_weights(self.runs, self.root)]


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
        path = Path(__file__).parent.parent / EXPERIMENTS / f"{name_or_path}.yaml"
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
    return Experiment(path.stem, restricted(spec, changes), path)
