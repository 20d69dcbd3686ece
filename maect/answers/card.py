"""Sections of a model card beside the model: data, training, results, licence."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maect.core.errors import UserError, did_you_mean
from maect.core.files import fill_template
from maect.core.yaml_files import read_yaml
from maect.data.config import index_digest, made_by
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig
from maect.evaluate.base import Features, Shards
from maect.experiment.load import WITHOUT_NORM
from maect.models.export import Card
from maect.records import EvaluationRecord, RunRecord, is_finished
from maect.report.tables import result_file
from maect.stages import STAGES, FineTune
from maect.stages.run import RunConfig

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

HUB = read_yaml(Path(__file__).parent / "hub.yaml")
"""BibTeX of the method of a stage, the hub's licences, and what it shows of an evaluation."""

IMAGENET = "ILSVRC/imagenet-1k"  # on the hub


def card_of(
    run: Path,
    licence: str | None = None,
    repository: str | None = None,
    base_model: str | None = None,
) -> Card:
    """Return the facts for a run's model card, as far as its results folder has them.

    Args:
        licence: of the weights, as the hub calls it.
        base_model: of the hub, that the weights come from; none: timm's, of weights of timm.

    Raises:
        UserError: a licence or a name that the hub does not take.
    """
    if licence is not None and licence not in HUB["licences"]:
        hint = did_you_mean(licence, HUB["licences"])
        raise UserError(f"--licence {licence}: not a licence that the hub knows; {hint}")
    for name in filter(None, (repository, base_model)):
        _check_name(name)
    labelled = STAGES[RunRecord.of(run).stage].labelled
    chain = list(reversed(_chain(run)))
    reads_labels = labelled or _reads_labels([config for _, config in chain])
    base = base_model or next(filter(None, (_of_timm(folder) for folder, _ in chain)), None)
    shards = dict.fromkeys(config.shards for _, config in chain if config.shards is not None)
    known = HUB["citations"]
    results = results_of(run)
    used = [(path.stem, one.provenance.get("test_data")) for path, one in _evaluations(run)]
    sections = fill_template(
        Path(__file__).with_suffix(".md"),
        reads_labels=reads_labels,
        data={s: open_index(s) if (s / "index.json").exists() else None for s in shards},
        chain=chain,
        base=base,
        results=results,
        used=[(name, text) for name, text in used if text],
        licence=licence,
        imported=[config.weights.name for _, config in chain if config.weights is not None],
        cited=dict.fromkeys(known[one.stage] for _, one in chain if one.stage in known),
    )
    return Card(
        labelled, reads_labels, licence, sections, results, repository, base, _hub_data(chain)
    )


def _check_name(name: str) -> None:
    """Refuse a name that no repository of the hub can have."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError("USER/NAME")
    except HFValidationError as error:
        raise UserError(f"{name}: not a name of a repository on the hub: {error}") from None


def _chain(run: Path) -> list[tuple[Path, RunConfig]]:
    """Return the run and the runs that it descends from, newest first."""
    chain = []
    folder: Path | None = run
    while folder is not None and (folder / "config.yaml").exists():
        chain.append((folder, RunConfig.read(folder / "config.yaml")))
        folder = chain[-1][1].source
    return chain


def _reads_labels(chain: Sequence[RunConfig]) -> bool | None:
    """Return whether a stage of a chain read labels; None: not known, as of imported weights."""
    if any(config.settings.reads_labels for config in chain):
        return True
    known = bool(chain) and chain[0].source is None and chain[0].settings.trains
    return False if known else None


def _hub_data(chain: Sequence[tuple[Path, RunConfig]]) -> tuple[str, ...]:
    """Return the hub's names of the data sets that the chain was trained on (ImageNet)."""
    for folder in (config.shards for _, config in chain if config.shards is not None):
        origin = made_by(folder) if (folder / "index.json").exists() else None
        whole = origin is not None and origin.kind in ("imagenet", "imagenet_train_tar")
        if whole and len(open_index(folder).class_names) == 1000:
            return (IMAGENET,)
    return ()


def _of_timm(run: Path) -> str | None:
    """Return the repository of the timm weights that a run imported."""
    weights = RunRecord.of(run).weights if is_finished(run) else None
    return f"timm/{weights.timm}" if weights and weights.timm else None


def results_of(run: Path) -> "tuple[EvalResult, ...]":
    """Return the metrics of this encoder's evaluations (`HUB`) in the hub's format.

    Scores of encoders that were fine-tuned from it are theirs, and are left out.
    """
    found = [*_of_classifier(run)]
    for path, result in _evaluations(run):
        known = HUB["metrics"].get(path.stem.partition(".on.")[0], {})
        for key, value in result.metrics.items():
            named = known.get(key) or known.get("*")
            data, split = _measured_on(path, result, key) if named else ("", "")
            if named and data and isinstance(value, float):
                task, kind, words = named
                found.append(_result(task, kind, words, data, split, value))
    return tuple(found)


def _of_classifier(run: Path) -> "Iterator[EvalResult]":
    """Return the test accuracy of a fine-tuned run's own classifier, after its last epoch."""
    scores = RunRecord.of(run).scores
    file = run / "config.yaml"
    config = RunConfig.read(file) if file.exists() else None
    if config is None or config.test is None or scores is None:
        return
    test = config.test
    settings = config.settings
    # A twin is scored on training images that it left out.
    is_twin = isinstance(settings, FineTune) and settings.held_out > 0
    if not is_twin and index_digest(test) in (None, scores.index_digest):  # None: removed since
        on = test.parent.name, test.name, scores.accuracies[-1]
        yield _result("image-classification", "accuracy", "Accuracy", *on)


def _result(task: str, kind: str, name: str, data: str, split: str, value: float) -> "EvalResult":
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type=task,
        task_name=HUB["tasks"][task],
        dataset_type=data,
        dataset_name=data,
        dataset_split=split or None,
        metric_type=kind,
        metric_name=f"{name} (%)",
        metric_value=round(value, 2),
    )


def _measured_on(path: Path, result: EvaluationRecord, metric: str) -> tuple[str, str]:
    """Return data set and split of a metric, by the file's inputs; empty without images."""
    written = path.with_suffix(".yaml")
    if not written.exists():  # made by hand
        return "unknown", result.settings.get("test_split", "")
    config = EvaluationConfig.read(written)
    inputs = config.settings.inputs()
    name = metric if metric in inputs else "test"  # several test sets: a metric for each
    kind = inputs.get(name)
    if isinstance(kind, Features):
        stem = config.paths(name)[0].stem.partition(WITHOUT_NORM)[0]
        return stem.removesuffix(f"-{kind.split}"), kind.split
    if isinstance(kind, Shards):
        return config.paths(name)[0].parent.name, kind.split
    return "", ""


def _evaluations(run: Path) -> list[tuple[Path, EvaluationRecord]]:
    """Return the results that were computed with the run's present encoder."""
    evaluations = run.parent.parent / "evaluations"
    names = sorted(path.stem for path in (evaluations / run.name).glob("*.json"))
    files = (result_file(evaluations, run.name, name) for name in names)
    return [(path, EvaluationRecord.read(path)) for path in files if path is not None]
