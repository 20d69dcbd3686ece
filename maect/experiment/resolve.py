"""The jobs of an experiment: the config and inputs of each, and whether it is finished."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from maect.core import stamps
from maect.core.stamps import StampedFile, stamp_path
from maect.data.config import CONFIG, made_by
from maect.evaluate import PROTOCOLS, EvaluationConfig, FeaturesConfig
from maect.evaluate.base import Features, Input, OutputOf, Shards, Trained
from maect.experiment.expand import Run, run_to_score
from maect.experiment.load import LAST, WITHOUT_NORM, Experiment
from maect.experiment.pages import PAGES, pages, report_config
from maect.records import RunRecord
from maect.stages import STAGES
from maect.stages.run import RunConfig

WRITE_SHARDS = "write_shards"
REPORT = "report_html"
"""Names of rules other than those of stages, protocols and pages."""


def run_config(experiment: Experiment, name: str) -> RunConfig:
    """Return the config of a training or an import."""
    run = experiment.runs[name]
    return RunConfig(
        run=name,
        stage=run.stage,
        recipe=run.recipe,
        size=run.size,
        seed=run.seed,
        shards=experiment.shards(run.dataset, run.split) if run.settings.trains else None,
        source=experiment.folder(run.source) if run.source else None,
        weights=run.weights,
        test=scored_on(experiment, run) if run.scored_by is not None else None,
        resize=_resize_elsewhere(experiment, run),
        encoder=run.encoder,
        settings=run.settings,
        computing=run.computing if run.settings.trains else None,
        online_evaluation=experiment.spec.online_evaluation if run.settings.trains else None,
    )


def scored_on(experiment: Experiment, run: Run) -> Path:
    """Shards that a run is scored on which is trained for an evaluation."""
    split = experiment.evaluation(str(run.source), str(run.scored_by)).test_split
    return experiment.shards(run.dataset, split)


def evaluation_config(experiment: Experiment, run: str, name: str) -> EvaluationConfig:
    """Return the config of an evaluation."""
    settings = experiment.evaluation(run, name)
    return EvaluationConfig(
        evaluation=name,
        protocol=settings.name,
        run=experiment.folder(run),
        resize=resize(experiment, run, experiment.dataset_of(name)),
        inputs={
            key: input_path(experiment, run, name, kind) for key, kind in settings.inputs().items()
        },
        settings=settings,
    )


def resize(experiment: Experiment, run: str, dataset: str) -> int | None:
    """Return the shorter side of a dataset's images: its own `resize`, else the training data's.

    Where neither does, that of the public encoder which the run is or began with; none: 256/224 of
    its image size. One that is trained for an evaluation sees images as its source does. An import
    is trained on no data set.
    """
    about = experiment.runs[run]
    trained = experiment.runs[str(about.source)] if about.scored_by else about
    stated = experiment.datasets[dataset].resize
    if stated is None and trained.settings.trains:
        stated = experiment.datasets[trained.dataset].resize
    while stated is None and about.encoder.resize is None and about.source is not None:
        about = experiment.runs[about.source]
    return stated or about.encoder.resize


def _resize_elsewhere(experiment: Experiment, run: Run) -> int | None:
    """Return the resize for images outside the experiment: that of the run's data set.

    An import may be given none of these. Images that are too small for it do not count.
    """
    stated = experiment.datasets[run.dataset].resize
    if not run.settings.trains and stated is not None and stated < run.encoder.image_size:
        return run.encoder.resize
    return resize(experiment, run.name, run.dataset)


def precision(experiment: Experiment, run: str) -> Literal["fp32", "tf32", "bf16"]:
    """Return the precision of a run's features: "fp32", "tf32" or "bf16"."""
    stated = experiment.spec.features
    return experiment.runs[run].encoder.features_precision if stated == "auto" else stated


def features_config(
    experiment: Experiment, run: str, dataset: str, kind: Features
) -> FeaturesConfig:
    """Return the config of the features of a split."""
    usual = experiment.runs[run].encoder.default_resize
    return FeaturesConfig(
        run=experiment.folder(run),
        shards=experiment.shards(dataset, kind.split),
        precision=precision(experiment, run),
        resize=resize(experiment, run, dataset) or usual,
        norm=kind.norm,
        blocks=kind.blocks,
    )


def features_file(experiment: Experiment, run: str, dataset: str, split: Features) -> Path:
    """Features of a split, made with a run's encoder."""
    name = f"{dataset}-{split.split}{ending(split)}.safetensors"
    return experiment.root / "features" / run / name


def features_read(experiment: Experiment) -> Iterable[tuple[str, str, Features]]:
    """(run, data set, split) of all features that evaluations read, without repetition."""
    return dict.fromkeys(
        (run, experiment.dataset_of(name), kind)
        for run, name in experiment.evaluations
        for kind in experiment.evaluation(run, name).inputs().values()
        if isinstance(kind, Features)
    )


def ending(features: Features) -> str:
    """Return the suffix of a features file, such as `.before_norm.last_4`."""
    norm = "" if features.norm else WITHOUT_NORM
    return norm + (f"{LAST}{features.blocks}" if features.blocks > 1 else "")


def features_of(path: Path) -> str:
    """Return `DATASET-SPLIT` of a features file, or of its stamp."""
    name = path.name.removesuffix(".done").removesuffix(".safetensors")
    return name.partition(WITHOUT_NORM)[0].partition(LAST)[0]


def of_ending(split: str, ending: str) -> Features:
    """Return the features in a file with this suffix after the split's name."""
    return Features(split, not ending, int(ending.partition(LAST)[2] or 1))


def input_path(experiment: Experiment, run: str, name: str, kind: Input) -> Path | list[Path]:
    """Return where an input of an evaluation is: a file, a folder of shards, or folders of runs."""
    dataset = experiment.dataset_of(name)
    match kind:
        case Features():
            return features_file(experiment, run, dataset, kind)
        case Shards(split):
            return experiment.shards(dataset, split)
        case OutputOf(evaluation):
            left = experiment.evaluation_name(evaluation, dataset)
            return experiment.root / "evaluations" / run / f"{left}.safetensors"
        case Trained(parts):
            return [experiment.folder(run_to_score(run, name, part)) for part in parts]


def inputs_of_run(experiment: Experiment, name: str) -> list[Path]:
    """Files that a training needs before it can start."""
    run = experiment.runs[name]
    shards = [experiment.shards(run.dataset, run.split) / "index.json"]
    if run.scored_by is not None:
        shards.append(scored_on(experiment, run) / "index.json")
    if run.source is None:
        return shards
    return [*shards, RunRecord.path(experiment.folder(run.source))]


def stamp_of(experiment: Experiment, file: Path) -> Path:
    """Return the stamp of the job that makes a file; of a page or a user's file, the file itself.

    Shards that another experiment has are not made here.
    """
    match file.relative_to(experiment.root).parts if file.is_relative_to(experiment.root) else ():
        case ("runs", _, _):
            return file.with_name(stamps.STAMP)
        case ("shards", dataset, split, _) if experiment.shards(dataset, split) == file.parent:
            return file.with_name(stamps.STAMP)
        case ("evaluations" | "features", _, _):
            return stamp_path(file)
    return file


def inputs_of_evaluation(experiment: Experiment, run: str, name: str) -> list[Path]:
    """Files that an evaluation needs before it can start."""
    settings = experiment.evaluation(run, name)
    files = [RunRecord.path(experiment.folder(run))] if settings.encoder_input else []
    for kind in settings.inputs().values():
        path = input_path(experiment, run, name, kind)
        if isinstance(path, list):
            for folder in path:
                files.append(RunRecord.path(folder))
        else:
            files.append(path / "index.json" if isinstance(kind, Shards) else path)
    return files


def targets(experiment: Experiment, words: Iterable[str]) -> list[str]:
    """Return words for Snakemake, with a result's stamp for each file of a result.

    So an encoder or an evaluation is asked for by its own name.
    """
    root = f"{experiment.root}/"
    return [
        str(stamp_of(experiment, Path(word))) if word.startswith(root) else word for word in words
    ]


def is_current(experiment: Experiment, path: Path, config: StampedFile) -> bool:
    """Return whether a job's stamp agrees with the experiment and with the job's files.

    Features that are gone are known by what they would be.
    """
    if not isinstance(config, EvaluationConfig):
        return stamps.is_current(path, config)
    run = config.run.name
    dataset = experiment.dataset_of(config.evaluation)
    features = {
        config.path(name): features_config(experiment, run, dataset, kind).identity_to_be
        for name, kind in config.settings.inputs().items()
        if isinstance(kind, Features)
    }
    return stamps.is_current(path, config, features)


def shards_are_current(experiment: Experiment, dataset: str, split: str) -> bool:
    """Return whether a split's own shards agree with their stamp.

    Those of other settings than the experiment's are current, too: a start warns of them, and never
    makes finished shards again. A view is.
    """
    own = experiment.own_shards(dataset, split)
    made = made_by(own)
    if experiment.datasets[dataset].splits[split].of is not None:
        with suppress(OSError):  # its list of classes is gone
            made = experiment.shards_config(dataset, split)
    return made is not None and stamps.is_current(own / CONFIG, made)


def files(experiment: Experiment) -> Iterator[tuple[Path, StampedFile]]:
    """Return the resolved file of every run, evaluation, page and features file, by path."""
    for run in experiment.runs:
        yield experiment.folder(run) / "config.yaml", run_config(experiment, run)
    for run, name in experiment.evaluations:
        path = experiment.root / "evaluations" / run / f"{name}.yaml"
        yield path, evaluation_config(experiment, run, name)
    for one in features_read(experiment):
        path = features_file(experiment, *one).with_suffix(".yaml")
        yield path, features_config(experiment, *one)
    yield from pages(experiment)


def job_config(experiment: Experiment, rule: str, given: Mapping[str, str]) -> StampedFile:
    """Return the content of a job's resolved file, by the name and the wildcards of its rule."""
    if rule in PROTOCOLS:
        return evaluation_config(experiment, given["run"], given["evaluation"])
    if rule in STAGES:
        return run_config(experiment, given["run"])
    if rule == "features":
        kind = of_ending(given["split"], given["norm"])
        return features_config(experiment, given["run"], given["dataset"], kind)
    if rule == REPORT:
        return report_config(experiment)
    return PAGES[rule].config(experiment, given.get("page", rule))
