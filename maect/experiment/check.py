"""What an experiment is refused for before anything is queued, and what a start would not find."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from maect.core.errors import UserError
from maect.core.names import did_you_mean
from maect.experiment.expand import Run
from maect.stages import starts_from

if TYPE_CHECKING:
    from maect.experiment.load import Experiment


def check_sources(runs: Mapping[str, Run], where: str) -> None:
    """Every run starts from what its stage can start from.

    Raises:
        UserError: the first that does not, with the reason.
    """
    for run in runs.values():
        _check_source(run, runs, f"{where}: {run.name}")
    for run in runs.values():
        chain = [run.name]
        while (source := runs[chain[-1]].source) is not None:
            if source in chain:
                raise UserError(f"{where}: {' <- '.join([*chain, source])} is a circle")
            chain.append(source)


def _check_source(run: Run, runs: Mapping[str, Run], where: str) -> None:
    allowed = starts_from(run.stage)
    if run.source is None:
        if allowed:
            raise UserError(f"{where}: stage {run.stage} needs `from`: a run to start from")
        return
    if run.source not in runs:
        raise UserError(
            f"{where}: starts from unknown run {run.source!r}; {did_you_mean(run.source, runs)}"
        )
    source = runs[run.source]
    if source.stage not in allowed:
        raise UserError(
            f"{where}: stage {run.stage} starts from {' or '.join(allowed) or 'nothing'}, "
            f"but {source.name} is a {source.stage} run"
        )
    try:
        run.settings.check_source(run.encoder, source.settings, source.encoder)
    except ValueError as error:
        raise UserError(f"{where}: {error} of {source.name}") from None


def missing_images(
    experiment: "Experiment", splits: Iterable[tuple[str, str]] | None = None
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


def missing_weights(experiment: "Experiment", runs: Iterable[str] | None = None) -> list[str]:
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


def missing_lists(experiment: "Experiment", evaluations: Iterable[tuple[str, str]]) -> list[str]:
    """Likewise, a sentence a folder of low-shot lists that evaluations of runs read."""
    given = [experiment.evaluation(*one).lists for one in evaluations]
    return [
        f"{experiment.file}: protocols: no folder {folder} of low-shot lists; "
        f"`maect retrieve low_shot_lists {folder}` brings them"
        for folder in sorted({folder for folder in given if folder})
        if not Path(folder).expanduser().is_dir()
    ]
