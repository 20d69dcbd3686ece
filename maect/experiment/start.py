"""Check an experiment before its first job, and write the configs of all jobs."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maect.core.files import seek_record
from maect.data.changes import advice
from maect.data.config import CONFIG
from maect.data.image_facts import warning
from maect.data.sources.base import is_there
from maect.evaluate import PROTOCOLS
from maect.experiment import resolve
from maect.experiment.chosen_shards import note_own, note_taken
from maect.experiment.load import Experiment
from maect.experiment.pages import PAGES
from maect.experiment.resolve import WRITE_SHARDS
from maect.recipes import Pixels
from maect.recipes.few_labels import OFFICIAL, FewLabels, checksum
from maect.records import RunRecord, is_finished
from maect.stages import STAGES, Stage, Training


@dataclass(frozen=True)
class PendingJob:
    """A job of Snakemake before it starts.

    Attributes:
        rule: its rule's name.
        wildcards: their values by their names.
        files: inputs and outputs of its command; none if it only names files.
        config: the resolved file that it reads, if it reads one.
        forced: whether the user wants it to compute though its result is finished.
    """

    rule: str
    wildcards: Mapping[str, str]
    files: Sequence[str]
    config: Path | None
    forced: bool


def faults(experiment: Experiment, jobs: Sequence[PendingJob]) -> list[str]:
    """Return a sentence for each input that jobs would miss or read wrongly."""
    sharded = _sharded(experiment, jobs)
    imports = [job for job in jobs if job.rule in STAGES]
    return [
        *(
            f"{experiment.file}: asks for nothing that the page {job.rule} would show; leave it out"
            for job in jobs
            if job.rule in PAGES and not PAGES[job.rule].names(experiment)
        ),
        *other_shards(
            experiment,
            [
                pair
                for pair in shards_of(experiment, [file for job in jobs for file in job.files])
                # One that is planned again before it was finished is refused by its plan.
                if pair not in sharded or _is_finished(experiment.shards(*pair))
            ],
        ),
        *missing_images(experiment, sharded, again=True),
        *missing_weights(experiment, [job.wildcards["run"] for job in imports if not job.forced]),
        *missing_weights(
            experiment, [job.wildcards["run"] for job in imports if job.forced], again=True
        ),
        *missing_lists(
            experiment,
            [
                (job.wildcards["run"], job.wildcards["evaluation"])
                for job in jobs
                if job.rule in PROTOCOLS and (job.forced or not _has_result(job))
            ],
        ),
    ]


def prepare(experiment: Experiment, jobs: Sequence[PendingJob]) -> None:
    """Write the configs of jobs, and give up the results of forced ones; for the folder's owner."""
    for job in jobs:
        if job.forced:
            _give_up(experiment, job)
        if job.rule == WRITE_SHARDS:
            _note_shards(experiment, job.wildcards["dataset"], job.wildcards["split"])
        elif job.config is not None:
            resolve.job_config(experiment, job.rule, job.wildcards).write(job.config)
    for dataset, split in experiment.splits:
        folder, own = experiment.shards(dataset, split), experiment.own_shards(dataset, split)
        if folder == own:
            continue
        if experiment.root not in folder.parents:
            print(f"maect: {dataset} {split} is sharded already: {folder}", file=sys.stderr)
        # What these were made of is from now on what this split asks for.
        note_taken(own, folder)


def _note_shards(experiment: Experiment, dataset: str, split: str) -> None:
    """Write the config of shards unless they are finished: then it records how they were made."""
    own = experiment.own_shards(dataset, split)
    is_view = experiment.datasets[dataset].splits[split].of is not None
    if is_view or not ((own / CONFIG).exists() and _is_finished(own)):
        note_own(own, experiment.shards_config(dataset, split))


def _give_up(experiment: Experiment, job: PendingJob) -> None:
    """Remove the completion record of a forced job, so that it is made again."""
    if job.rule in STAGES:
        _give_up_training(experiment.folder(job.wildcards["run"]), STAGES[job.rule])
    elif job.rule == WRITE_SHARDS:
        own = experiment.own_shards(job.wildcards["dataset"], job.wildcards["split"])
        for path in [own / "index.json", *own.glob("parts/[0-9]*.json")]:
            path.unlink(missing_ok=True)
    elif job.config is not None and (job.rule in PROTOCOLS or job.rule == "features"):
        ending = ".json" if job.rule in PROTOCOLS else ".safetensors"
        job.config.with_suffix(ending).unlink(missing_ok=True)


def _give_up_training(folder: Path, stage: type[Stage]) -> None:
    """Remove a run's record, but keep it where `maect clean` has removed its states."""
    goes_on = issubclass(stage, Training) and stage.keeps_state
    if goes_on and is_finished(folder) and not any(folder.glob("state/step-*/state.json")):
        print(
            f"maect: {folder}: has no state to go on from, so it stays as it is; to train it from "
            "the beginning, remove the folder",
            file=sys.stderr,
        )
        return
    RunRecord.path(folder).unlink(missing_ok=True)


def _sharded(experiment: Experiment, jobs: Iterable[PendingJob]) -> list[tuple[str, str]]:
    """Return (dataset, split) whose images are listed and read by jobs."""
    given = (
        (job, (job.wildcards["dataset"], job.wildcards["split"]))
        for job in jobs
        if job.rule == WRITE_SHARDS
    )
    return sorted(
        pair for job, pair in given if job.forced or not _is_finished(experiment.own_shards(*pair))
    )


def _has_result(job: PendingJob) -> bool:
    """Return whether an evaluation has a result, of which its job decides whether it is current."""
    return job.config is not None and job.config.with_suffix(".json").exists()


def missing_images(
    experiment: Experiment,
    splits: Iterable[tuple[str, str]] | None = None,
    again: bool = False,
) -> list[str]:
    """Return a sentence for each folder of images (of `splits`, or all) that is missing.

    Not of shards that are finished, unless they are made `again`.
    """
    missing = []
    for name, split in experiment.splits if splits is None else splits:
        given = experiment.datasets[name].splits[split]
        if not again and _is_finished(experiment.shards(name, split)):
            continue
        where = f"{experiment.file}: datasets: {name}"
        images = experiment.images(name, split)
        if given.images is not None and not is_there(images):
            missing.append(
                f"{where}: no images at {images} (split {split}){_unset(images)}; "
                "correct `images` there or put the images in place"
            )
        lost = [file for file in given.files() if not Path(file).is_file()]
        missing += [f"{where}: no file {file} (split {split})" for file in lost]
    return missing


def missing_weights(
    experiment: Experiment, runs: Iterable[str] | None = None, again: bool = False
) -> list[str]:
    """Return a sentence for each file of weights that is missing, for runs or for all."""
    chosen = [experiment.runs[name] for name in (experiment.runs if runs is None else runs)]
    return [
        f"{experiment.file}: runs: {run.name}: no weights at {run.weights}{_unset(run.weights)}; "
        "correct `weights` there or fetch them (maect retrieve, docs/weights.md)"
        for run in chosen
        if run.weights is not None
        and (again or not is_finished(experiment.folder(run.name)))
        and not run.weights.is_file()
    ]


def missing_lists(experiment: Experiment, evaluations: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence for each folder of low-shot lists that lacks files of these evaluations."""
    gone: dict[Path, Path] = {}
    own = set()
    for settings in (experiment.evaluation(*one) for one in evaluations):
        for file in settings.lists if isinstance(settings, FewLabels) else []:
            if (found := checksum(file)) is None:
                gone[file.parent] = min(file, gone.get(file.parent, file))
            elif found != OFFICIAL.get(file.name):
                own.add(file.parent)
    sentences = []
    for folder, file in sorted(gone.items()):
        what = file.name if folder.is_dir() else "low-shot lists"
        official = file.name in OFFICIAL and folder not in own
        cure = f"; `maect retrieve low_shot_lists {folder}` brings them" if official else ""
        sentences.append(
            f"{experiment.file}: protocols: no {what} in {folder}{_unset(folder)}{cure}"
        )
    return sentences


def changed_images(experiment: Experiment) -> list[str]:
    """Return a sentence for each split whose images are no longer those in its shards."""
    notes: list[str] = []
    for pair in experiment.splits:
        folder = experiment.shards(*pair)
        if not _is_finished(folder):
            continue
        if others := other_shards(experiment, [pair]):
            notes += others
        elif _is_sharded(experiment, *pair) and (found := experiment.changes(*pair)):
            notes.append(advice(folder, found, experiment.own_shards(*pair)))
        record = seek_record(folder / "index.json")
        if said := warning(record, Pixels.of_shards(record.get("options", {}))):
            notes.append(f"{folder}: {said}")
    return notes


def other_shards(experiment: Experiment, splits: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence for each split whose settings are not those of its shards.

    Images that were merely added, removed or edited where they lie are none of these.
    """
    notes = []
    for name, split in splits:
        folder = experiment.shards(name, split)
        given = experiment.datasets[name].splits[split]
        if not (given.source.sharded and (folder / "plan.json").exists()):
            continue
        # Bundled images are always the same.
        own = _is_sharded(experiment, name, split)
        found = experiment.changes(name, split) if own else None
        parts = [experiment.differing_settings(name, split)]
        if written := experiment.other_kind(name):
            parts.append(f"kind ({experiment.datasets[name].kind}, made with {written})")
        if found and found.are_replaced:
            moved = f"images ({found.now}, made of {found.before})"
            parts.append(f"{moved if found.moved else found.now}: {found}")
        if differs := "; ".join(part for part in parts if part):
            again = shlex.quote(str(experiment.own_shards(name, split)))
            notes.append(
                f"{experiment.file}: datasets: {name}: {split}: not what its shards were made of: "
                f"{differs}. To have them made anew: rm -r {again}; else put back what was changed"
            )
    return notes


def shards_of(experiment: Experiment, files: Iterable[str]) -> list[tuple[str, str]]:
    """Return (dataset, split) whose shards, or features of them, are among files of jobs.

    Of a view it is the split whose images it shows.
    """
    paths = [Path(file) for file in files]
    folders = {folder for path in paths for folder in path.parents}
    features = {
        resolve.features_of(path) for path in paths if experiment.root / "features" in path.parents
    }
    found: dict[tuple[str, str], None] = {}
    for dataset, split in experiment.splits:
        if f"{dataset}-{split}" in features or experiment.shards(dataset, split) in folders:
            found[dataset, experiment.datasets[dataset].splits[split].of or split] = None
    return list(found)


def _is_sharded(experiment: Experiment, name: str, split: str) -> bool:
    """Return whether a split's shards are made of images of the user's."""
    given = experiment.datasets[name].splits[split]
    return given.images is not None and given.source.sharded


def _unset(path: Path) -> str:
    """Return a hint at the environment variables in a path that are not set."""
    names = re.findall(r"\$\{?(\w+)", str(path))
    return f", as {' and '.join(names)} is not set: export it" if names else ""


def _is_finished(shards: Path) -> bool:
    return (shards / "index.json").exists()
