"""What a start of an experiment would not find, for messages before anything is queued."""

from collections.abc import Iterable
from pathlib import Path

from maect.experiment.load import Experiment


def missing_images(
    experiment: Experiment, splits: Iterable[tuple[str, str]] | None = None
) -> list[str]:
    """What a start would not find of the images: a sentence each, empty if all is there.

    Args:
        experiment: whose.
        splits: (dataset, split) to look for; none: all.
    """
    faults = []
    for name, split in experiment.splits if splits is None else splits:
        given = experiment.datasets[name].splits[split]
        if (experiment.shards(name, split) / "index.json").exists():
            continue
        where, images = f"{experiment.file}: datasets: {name}", experiment.images(name, split)
        if given.images is not None and not images.exists():
            faults.append(
                f"{where}: no images at {images} (split {split}); "
                "correct `images` there or put the images in place"
            )
        lost = [file for file in given.files() if not Path(file).exists()]
        faults += [f"{where}: no file {file} (split {split})" for file in lost]
    return faults


def missing_weights(experiment: Experiment, runs: Iterable[str] | None = None) -> list[str]:
    """Likewise, a sentence a file of weights that is to be imported, for runs or for all."""
    chosen = [experiment.runs[name] for name in (experiment.runs if runs is None else runs)]
    return [
        f"{experiment.file}: runs: {run.name}: no weights at {run.weights}; correct `weights` "
        "there or fetch them (maect retrieve, docs/weights.md)"
        for run in chosen
        if run.weights is not None
        and not (experiment.folder(run.name) / "run.json").exists()
        and not run.weights.is_file()
    ]


def missing_lists(experiment: Experiment, evaluations: Iterable[tuple[str, str]]) -> list[str]:
    """Likewise, a sentence a folder of low-shot lists that evaluations of runs read."""
    given = [experiment.evaluation(*one).lists for one in evaluations]
    return [
        f"{experiment.file}: protocols: no folder {folder} of low-shot lists; "
        f"`maect retrieve low_shot_lists {folder}` brings them"
        for folder in sorted({folder for folder in given if folder})
        if not Path(folder).expanduser().is_dir()
    ]
