"""The jobs of an experiment, each as the typed file that says all it is told, and its edges."""

from collections.abc import Iterator
from pathlib import Path

from maect.core.settings_file import SettingsFile
from maect.evaluate import Features, Input, Left, Shards, Trained
from maect.evaluate.config import EvaluationConfig
from maect.experiment.expand import run_to_score
from maect.experiment.load import Experiment
from maect.stages.config import RunConfig


def run_config(experiment: Experiment, name: str) -> RunConfig:
    """All that a training or an import is told."""
    run = experiment.runs[name]
    return RunConfig(
        run=name,
        stage=run.stage,
        recipe=run.recipe,
        size=run.size,
        seed=run.seed,
        shards=experiment.shards(run.dataset, "train") if run.settings.trains else None,
        source=experiment.folder(run.source) if run.source else None,
        weights=run.weights,
        encoder=run.encoder,
        settings=run.settings,
    )


def evaluation_config(experiment: Experiment, run: str, name: str) -> EvaluationConfig:
    """All that a protocol is told."""
    settings = experiment.evaluation(run, name)
    return EvaluationConfig(
        evaluation=name,
        protocol=settings.name,
        run=experiment.folder(run),
        resize=experiment.datasets[experiment.default_dataset].resize,
        inputs={
            key: input_path(experiment, run, name, kind) for key, kind in settings.inputs().items()
        },
        settings=settings,
    )


def features_file(experiment: Experiment, run: str, dataset: str, split: str) -> Path:
    """Features of a split, made with a run's encoder."""
    return experiment.root / "features" / run / f"{dataset}-{split}.safetensors"


def input_path(experiment: Experiment, run: str, name: str, kind: Input) -> Path | list[Path]:
    """Where an input of an evaluation is: a file, a folder of shards, or folders of runs."""
    dataset = experiment.default_dataset
    match kind:
        case Features(split):
            return features_file(experiment, run, dataset, split)
        case Shards(split):
            return experiment.shards(dataset, split)
        case Left(evaluation):
            return experiment.root / "evaluations" / run / f"{evaluation}.safetensors"
        case Trained(parts):
            return [experiment.folder(run_to_score(run, name, part)) for part in parts]


def read_by_run(experiment: Experiment, name: str) -> list[Path]:
    """Files that a training needs before it can start."""
    run = experiment.runs[name]
    shards = [experiment.shards(run.dataset, "train") / "index.json"]
    if run.source is None:
        return shards
    source = experiment.runs[run.source]
    sure = left_by(experiment, source.stage)
    files = [file for file in run.settings.takes(source.settings) if file in sure]
    return shards + [experiment.folder(run.source) / file for file in (*files, "run.json")]


def left_by(experiment: Experiment, stage: str) -> list[str]:
    """Files beside `run.json` that all runs of a stage leave; some pre-trainings have no head."""
    leave = [experiment.runs[name].settings.leaves for name in experiment.runs_of(stage)]
    return [file for file in leave[0] if all(file in other for other in leave)] if leave else []


def read_by_evaluation(experiment: Experiment, run: str, name: str) -> list[Path]:
    """Files that an evaluation needs before it can start."""
    settings = experiment.evaluation(run, name)
    files = [experiment.folder(run) / "encoder.safetensors"] if settings.encoder_input else []
    for kind in settings.inputs().values():
        path = input_path(experiment, run, name, kind)
        if isinstance(path, list):
            for folder in path:
                leaves = experiment.runs[folder.name].settings.leaves
                files += [folder / file for file in (*leaves, "run.json")]
        else:
            files.append(path / "index.json" if isinstance(kind, Shards) else path)
    return files


def files(experiment: Experiment) -> Iterator[tuple[Path, SettingsFile]]:
    """The resolved file of every run and evaluation, and where it is."""
    for run in experiment.runs:
        yield experiment.folder(run) / "config.yaml", run_config(experiment, run)
    for run, name in experiment.evaluations:
        path = experiment.root / "evaluations" / run / f"{name}.yaml"
        yield path, evaluation_config(experiment, run, name)
