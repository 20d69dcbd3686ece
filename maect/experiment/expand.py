"""Expansion of the names in an experiment: its runs, and the lines of its tables and figures."""

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maect.core.errors import UserError, check_names, did_you_mean
from maect.core.settings import validated
from maect.evaluate.base import Protocol
from maect.experiment.schema import ExperimentSpec, Rows, RunSpec, check_name, fill_path, filled
from maect.recipes import Encoder, Pixels, is_own, load_encoder
from maect.recipes.settings import PLAIN, Computing
from maect.recipes.timm_encoders import find_timm
from maect.records import lineage, of_seed, seedless
from maect.report.configs import Row
from maect.stages import Stage, check_source, load_computing, load_recipe
from maect.stages.imported import Import


@dataclass(frozen=True)
class Run:
    """One stage with its settings.

    Attributes:
        method: how tables call it.
        dataset, split: whose images it is trained on.
        source: name of the run that it starts from.
        weights: the checkpoint that is imported, if any.
        scored_by: the evaluation of `source` that it is trained for, if any.
    """

    name: str
    settings: Stage
    encoder: Encoder
    size: str
    method: str
    dataset: str
    split: str = "train"
    seed: int = 0
    recipe: str | None = None
    source: str | None = None
    weights: Path | None = None
    scored_by: str | None = None
    computing: Computing = PLAIN

    @property
    def stage(self) -> str:
        """Name of its stage."""
        return self.settings.name

    @property
    def architecture(self) -> str:
        """Return the encoder's size, with the image size if that is not its own."""
        if isinstance(self.settings, Import) and self.settings.timm is not None:
            return self.settings.timm.partition(".")[0]
        usual = load_encoder(self.size)
        shape = self.encoder
        own = [
            f"{name}{getattr(shape, key)}"
            for name, key in (("w", "width"), ("d", "depth"), ("p", "patch_size"))
            if getattr(shape, key) != getattr(usual, key)
        ]
        pixels = [] if shape.image_size == usual.image_size else [str(shape.image_size)]
        return "_".join([self.size, *own, *pixels])


def expand_runs(spec: ExperimentSpec, file: Path) -> dict[str, Run]:
    """Return all runs of the file, one for each combination of `each` and seed, or UserError."""
    runs: dict[str, Run] = {}
    default = next(iter(spec.datasets))
    for template, one in spec.runs.items():
        if spec.starting_from == "public":
            one = one.from_public()
        for values in itertools.product(*one.each.values()):
            chosen = dict(zip(one.each, map(str, values), strict=True))
            seeds = min(spec.seeds, one.seeds or spec.seeds) if one.weights is None else 1
            for seed in range(seeds):
                dataset = one.dataset or default
                pixels = spec.datasets[dataset].pixels if dataset in spec.datasets else None
                run = _run(file, template, one, chosen, seed, dataset, pixels)
                if run.name in runs:
                    raise UserError(f"{file}: runs: {run.name} is defined twice")
                runs[run.name] = run
    return _as_sources(_shared_by_seeds(runs))


def _run(
    file: Path,
    template: str,
    spec: RunSpec,
    chosen: dict[str, str],
    seed: int,
    dataset: str,
    pixels: Pixels | None,
) -> Run:
    where = f"{file}: runs"

    def fill(text: str) -> str:
        text = re.sub(r"\$\{(\w+)\}", r"${{\1}}", text)  # a variable, which `fill_path` fills in
        try:
            return text.format_map(chosen)
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(f"{where}: {template}: {text!r}: {error} is not in `each`") from None

    base = fill(template)
    size = fill(spec.size)
    recipe = fill(spec.recipe or "")
    check_name(where, base)
    if end := base.removeprefix(seedless(base)):
        raise UserError(f"{where}: {base}: an end such as {end} is for seeds; choose another name")
    settings: Stage
    computing = PLAIN
    try:
        if recipe:
            written = str(file.parent / fill_path(recipe)) if is_own(recipe) else recipe
            overrides = filled(spec.overrides, fill)
            settings = load_recipe(written, size, overrides)
            how = filled(spec.computing, fill)
            computing = load_computing(written, size, overrides, how)
            settings.check_computing(computing)
            encoder = load_encoder(size, spec.image_size, pixels)
            if spec.encoder:
                encoder = validated(Encoder, encoder.model_dump() | spec.encoder, "encoder")
        elif spec.timm:
            known = find_timm(fill(spec.timm))
            size = known.size
            settings = Import(timm=known.name)
            encoder = known.encoder(spec.image_size, pixels)
        else:
            layout = fill(spec.layout) if spec.layout else None
            settings = validated(Import, {"layout": layout}, "weights")
            encoder = load_encoder(size, spec.image_size, pixels)
            encoder = encoder.model_copy(update=settings.shape)
        settings.check_encoder(encoder)
    except (UserError, ValueError) as error:
        raise UserError(f"{where}: {base}: {error}") from None
    return Run(
        name=of_seed(base, seed),
        settings=settings,
        encoder=encoder,
        size=size,
        method=fill(spec.method) if spec.method else re.sub(rf"_{size}(?=_|$)", "", base),
        dataset=dataset,
        seed=seed,
        recipe=recipe or None,
        source=of_seed(fill(spec.source), seed) if spec.source else None,
        weights=Path(fill_path(fill(spec.weights))) if spec.weights else None,
        computing=computing,
    )


def _shared_by_seeds(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Let runs of every seed start from the same imported weights, which have no seed."""
    shared = {name for name, run in runs.items() if not run.settings.trains}
    return {
        name: replace(run, source=seedless(run.source))
        if run.source and run.source not in runs and seedless(run.source) in shared
        else run
        for name, run in runs.items()
    }


def _as_sources(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Give runs the registers and place of norms of their source: no size has these."""
    made = dict(runs)
    for name, run in runs.items():
        first = begins_with(name, runs).encoder
        if run.settings.trains:
            given = {"norm": first.norm, "registers": first.registers}
            made[name] = replace(run, encoder=run.encoder.model_copy(update=given))
    return made


def runs_to_score(
    runs: Mapping[str, Run], evaluations: Iterable[tuple[str, str, Protocol, Computing, str]]
) -> dict[str, Run]:
    """Return the runs that evaluations ask to be trained: `RUN.EVALUATION.PART`.

    Evaluations are run, name, settings, way of training and data set, whatever the run was trained
    on.
    """
    trained = [
        Run(
            name=run_to_score(run, name, part),
            settings=settings,
            encoder=runs[run].encoder,
            size=runs[run].size,
            method=f"{runs[run].method}.{name}.{part}",
            dataset=dataset,
            split=protocol.train_split,
            seed=seed,
            source=run,
            scored_by=name,
            computing=computing,
        )
        for run, name, protocol, computing, dataset in evaluations
        for part, (settings, seed) in protocol.trainings().items()
    ]
    return {run.name: run for run in trained}


def run_to_score(run: str, evaluation: str, part: str) -> str:
    """Name of a run that is trained for an evaluation of another run."""
    return f"{run}.{evaluation}.{part}"


def begins_with(name: str, runs: Mapping[str, Run]) -> Run:
    """Return the first run in the chain that a run starts from."""
    *_, first = lineage(name, runs.get)
    return first


def check_sources(runs: Mapping[str, Run], where: str) -> None:
    """Refuse the first run whose source its stage cannot start from (UserError)."""
    for run in runs.values():
        this = f"{where}: {run.name}"
        given = None
        if run.source is not None:
            if run.source not in runs:
                hint = did_you_mean(run.source, runs)
                raise UserError(f"{this}: starts from unknown run {run.source!r}; {hint}")
            source = runs[run.source]
            given = source.name, source.settings, source.encoder
        check_source(this, run.settings, run.encoder, given, "from")
    for name in runs:
        behind = list(lineage(name, runs.get))
        if again := behind[-1].source:
            names = [*(run.name for run in behind), again]
            raise UserError(f"{where}: {' <- '.join(names)} is a circle")


REPLACED = ("seeds", "starting_from", "storage")
CHANGES = (*REPLACED, "splits", "tables", "figures", "protocols")
"""Keys of `--config` besides `experiment`: other values, or a part of the experiment."""


def restricted(spec: ExperimentSpec, changes: Mapping[str, Any]) -> ExperimentSpec:
    """Reduce an experiment to some of its `tables`, `figures` and `protocols`.

    Raises:
        UserError: one that the file does not ask for.
    """
    new: dict[str, Any] = {}
    for kind in ("tables", "figures"):
        if kind in changes:
            rows = getattr(spec, kind)
            wanted = names(changes[kind])
            check_names(f"--config {kind}", wanted, rows)
            new[kind] = {name: rows[name] for name in wanted}
    if "protocols" in changes:
        wanted = names(changes["protocols"])
        check_names("--config protocols", wanted, [p for e in spec.evaluate for p in e.protocols])
        new["evaluate"] = [
            entry.model_copy(update={"protocols": [p for p in entry.protocols if p in wanted]})
            for entry in spec.evaluate
        ]
    return spec.model_copy(update=new)


def names(value: Any) -> list[str]:
    """`a,b`, a list or a single value as names; nothing (`tables=`): none."""
    if isinstance(value, str):
        value = value.split(",")
    elif not isinstance(value, list | tuple):
        value = [] if value is None else [value]
    return [name for item in value if (name := str(item).strip())]


def matching(pattern: str, runs: Mapping[str, Run]) -> list[str]:
    """Return the runs of all seeds that a name or a pattern such as `ct_*` names.

    A run that is trained for an evaluation has to be named in full.
    """
    return [
        name
        for name, run in runs.items()
        if (name == pattern if run.scored_by else fnmatch.fnmatchcase(seedless(name), pattern))
    ]


def may_be_scored(name: str, runs: Mapping[str, Run]) -> bool:
    """Return whether a name is that of a run which an evaluation would have trained."""
    return any(name.startswith(f"{run}.") for run in runs)


def lines(
    where: str, rows: Rows, runs: Mapping[str, Run], shown: Collection[str], partial: bool = False
) -> list[Row]:
    """Return the lines of a table or figure, in the order of the rows, then in that of `runs`.

    Args:
        shown: names of the runs that have anything to show.
        partial: leave out rows without a run to show, since fewer evaluations were asked for.

    Raises:
        UserError: a row that matches nothing, or two runs on one line that are not seeds.
    """
    by_line: dict[tuple[str, str], list[str]] = {}
    # Without a method it is the run's own.
    named_rows = ([("", row)] if isinstance(row, str) else row.items() for row in rows)
    for method, pattern in itertools.chain.from_iterable(named_rows):
        named = matching(pattern, runs)
        matched = [name for name in named if name in shown]
        if not matched and not (partial and (named or may_be_scored(pattern, runs))):
            raise UserError(f"{where}: no evaluated run is named {pattern!r}")
        for name in matched:
            key = runs[name].architecture, method or runs[name].method
            line = by_line.setdefault(key, [])
            if line and seedless(line[0]) != seedless(name):
                raise UserError(
                    f"{where}: {line[0]} and {name} are both {' '.join(key)}; "
                    f"give one another name with `METHOD: {name}`"
                )
            if name not in line:
                line.append(name)
    return [Row(*key, tuple(line)) for key, line in by_line.items()]


def without_twins(rows: Iterable[Row], runs: Mapping[str, Run]) -> list[Row]:
    """Remove the lines of a table that another one, `METHOD_public`, repeats.

    Both begin with the same file: there is nothing to compare.
    """
    rows = list(rows)
    first = {(row.architecture, row.method): begins_with(row.runs[0], runs).weights for row in rows}
    return [
        row
        for row in rows
        if (weights := first[row.architecture, row.method]) is None
        or weights != first.get((row.architecture, f"{row.method}_public"))
    ]
