"""The runs of an experiment: from templates to settings, each with what it starts from, checked."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from maect.core.errors import UserError
from maect.core.names import check_names, did_you_mean
from maect.core.settings import digest
from maect.experiment.schema import (
    ExperimentSpec,
    RunSpec,
    fill_path,
    fill_values,
    flatten,
    yaml_scalar,
)
from maect.experiment.weights import shared_by_seeds
from maect.recipes import Encoder, load_encoder
from maect.stages import Stage, load_import, load_recipe
from maect.stages.imported import Import
from maect.stages.tune import Tune

STAGE_NAMES = {"Pretrain": "pretrain", "Head": "head", "Tune": "tune", "Import": "import"}
# What may start from what; the value None means "from nothing".
SOURCES = {
    "pretrain": (None,),
    "import": (None,),
    "head": ("pretrain", "import", "tune"),
    "tune": ("head", "pretrain", "import"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
    def architecture(self) -> str:
        """How tables name the encoder: its size, with the image size if that is not its own."""
        pixels = self.encoder.image_size
        own = pixels == load_encoder(self.size).image_size
        return self.size if own else f"{self.size}_{pixels}"

    @property
    def digest(self) -> str:
        """Identity of what this run is told; what it starts from is not part of it."""
        return digest(self.stage, self.settings, self.encoder, self.seed)


def expand_runs(spec: ExperimentSpec, file: Path) -> dict[str, Run]:
    """All runs by name, one a combination of `each` and seed.

    Raises:
        UserError: a run that is wrong in itself or starts from what it cannot start from.
    """
    runs: dict[str, Run] = {}
    default = next(iter(spec.datasets))
    for template, one in spec.runs.items():
        if spec.starting_from == "public":
            one = one.from_public()
        for values in itertools.product(*one.each.values()):
            chosen = dict(zip(one.each, map(str, values), strict=True))
            for seed in range(spec.seeds if one.weights is None else 1):
                run = _run(template, one, chosen, seed, default, file)
                if run.name in runs:
                    raise UserError(f"{file}: runs: {run.name} is defined twice")
                runs[run.name] = run
    runs = shared_by_seeds(runs)
    for run in runs.values():
        check_names(f"{file}: runs: {run.name}: dataset", [run.dataset], spec.datasets)
        _check_source(run, runs, f"{file}: runs: {run.name}")
    _check_order(runs, file)
    return runs


def _run(
    template: str, spec: RunSpec, chosen: dict[str, str], seed: int, dataset: str, file: Path
) -> Run:
    def fill(text: str) -> str:
        try:
            return text.format_map(chosen)
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(
                f"{file}: runs: {template}: {text!r}: {error} is not in `each`"
            ) from None

    base, size, recipe = fill(template), fill(spec.size), fill(spec.recipe or "")
    layout = fill(spec.layout) if spec.layout else None
    if not NAME.fullmatch(base):
        raise UserError(f"{file}: runs: {base!r} is not a name (letters, digits, _ . and -)")
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
        raise UserError(f"{file}: runs: {base}: {error}") from None
    if isinstance(settings, Tune) and settings.frozen_blocks >= encoder.depth:
        raise UserError(
            f"{file}: runs: {base}: frozen_blocks {settings.frozen_blocks} leaves none of the "
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
        dataset=spec.dataset or dataset,
        seed=seed,
        source=fill(spec.source) + suffix if spec.source else None,
        arguments=tuple(arguments),
        weights=Path(fill_path(fill(spec.weights))) if spec.weights else None,
    )


def _check_source(run: Run, runs: Mapping[str, Run], place: str) -> None:
    if run.source is None:
        if None not in SOURCES[run.stage]:
            raise UserError(f"{place}: stage {run.stage} needs `from`: a run to start from")
        return
    if run.source not in runs:
        hint = did_you_mean(run.source, runs)
        raise UserError(f"{place}: starts from unknown run {run.source!r}; {hint}")
    source = runs[run.source]
    if source.stage not in SOURCES[run.stage]:
        allowed = " or ".join(str(s) for s in SOURCES[run.stage] if s) or "nothing"
        raise UserError(
            f"{place}: stage {run.stage} starts from {allowed}, "
            f"but {source.name} is a {source.stage} run"
        )
    if source.encoder != run.encoder:
        raise UserError(f"{place}: its encoder differs from that of {source.name}")
    ours = getattr(run.settings, "head", None)
    theirs = getattr(source.settings, "head", None)
    if run.stage == "tune" and theirs is not None:
        for key in ("queue_size", "projector_hidden", "predictor_hidden", "embedding"):
            if getattr(ours, key) != getattr(theirs, key):
                raise UserError(
                    f"{place}: head.{key} {getattr(ours, key)} differs from "
                    f"{getattr(theirs, key)} of {source.name}"
                )


def _check_order(runs: Mapping[str, Run], file: Path) -> None:
    for run in runs.values():
        seen: list[str] = []
        name: str | None = run.name
        while name is not None:
            if name in seen:
                raise UserError(f"{file}: runs: {' <- '.join([*seen, name])} is a circle")
            seen.append(name)
            name = runs[name].source
