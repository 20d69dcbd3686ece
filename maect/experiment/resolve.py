"""The jobs of an experiment: the config, inputs and outputs of each."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from maect.core.settings import SettingsFile
from maect.evaluate import EvaluationConfig, FeaturesConfig
from maect.evaluate.base import Features, Input, OutputOf, Shards, Trained
from maect.experiment.expand import Run, run_to_score
from maect.experiment.load import Experiment
from maect.experiment.pages import pages
from maect.records import RunRecord
from maect.stages.run import RunConfig


def run_config(experiment: Experiment, name: str) -> RunConfig:
    """The config of a training or an import."""
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
    """The config of an evaluation."""
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
    """Shorter side of a dataset's images, where it says none that of what the run is trained on.

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
    """Likewise of images outside of the experiment: as those of the run's data set.

    An import may be given none of these. Images that are too small for it do not count.
    """
    stated = experiment.datasets[run.dataset].resize
    if not run.settings.trains and stated is not None and stated < run.encoder.image_size:
        return run.encoder.resize
    return resize(experiment, run.name, run.dataset)


def precision(experiment: Experiment, run: str) -> Literal["fp32", "tf32", "bf16"]:
    """In which precision a run's features are computed: "fp32", "tf32" or "bf16"."""
    stated = experiment.spec.features
    return experiment.runs[run].encoder.features_precision if stated == "auto" else stated


def features_config(
    experiment: Experiment, run: str, dataset: str, kind: Features
) -> FeaturesConfig:
    """All that features of a split are made by."""
    usual = experiment.runs[run].encoder.default_resize
    return FeaturesConfig(
        run=experiment.folder(run),
        shards=experiment.shards(dataset, kind.split),
        precision=precision(experiment, run),
        resize=resize(experiment, run, dataset) or usual,
        norm=kind.norm,
        blocks=kind.blocks,
    )


WITHOUT_NORM = ".before_norm"
"""Behind a split's name: its features before the encoder's final norm."""
LAST = ".last_"
"""Behind that, with a number: those of so many last blocks side by side."""


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
    """Return what is behind a split's name in that of its features' file: `.before_norm.last_4`."""
    norm = "" if features.norm else WITHOUT_NORM
    return norm + (f"{LAST}{features.blocks}" if features.blocks > 1 else "")


def of_ending(split: str, ending: str) -> Features:
    """The features that are in a file with this behind the split's name."""
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
            left = experiment.on(evaluation, dataset)
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
    source = experiment.runs[run.source]
    sure = outputs_of(experiment, source.stage)
    files = [file for file in run.settings.inputs(source.settings) if file in sure]
    folder = experiment.folder(run.source)
    return [*shards, *(folder / file for file in files), RunRecord.path(folder)]


def outputs_of(experiment: Experiment, stage: str) -> list[str]:
    """Files beside its record that all runs of a stage leave; some pre-trainings have no head."""
    leave = [experiment.runs[name].settings.outputs for name in experiment.runs_of(stage)]
    return [file for file in leave[0] if all(file in other for other in leave)] if leave else []


def inputs_of_evaluation(experiment: Experiment, run: str, name: str) -> list[Path]:
    """Files that an evaluation needs before it can start."""
    settings = experiment.evaluation(run, name)
    files = [experiment.folder(run) / "encoder.safetensors"] if settings.encoder_input else []
    for kind in settings.inputs().values():
        path = input_path(experiment, run, name, kind)
        if isinstance(path, list):
            for folder in path:
                outputs = experiment.runs[folder.name].settings.outputs
                files += [*(folder / file for file in outputs), RunRecord.path(folder)]
        else:
            files.append(path / "index.json" if isinstance(kind, Shards) else path)
    return files


def files(experiment: Experiment) -> Iterator[tuple[Path, SettingsFile]]:
    """The resolved file of every run, evaluation, page and features that are read, by path."""
    for run in experiment.runs:
        yield experiment.folder(run) / "config.yaml", run_config(experiment, run)
    for run, name in experiment.evaluations:
        path = experiment.root / "evaluations" / run / f"{name}.yaml"
        yield path, evaluation_config(experiment, run, name)
    for one in features_read(experiment):
        path = features_file(experiment, *one).with_suffix(".yaml")
        yield path, features_config(experiment, *one)
    for path, config, _ in pages(experiment):
        yield path, config
