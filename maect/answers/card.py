"""Sections of a model card beside the model: data, training, results, licence."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maect.core.errors import UserError, did_you_mean
from maect.core.yaml_files import read_yaml
from maect.data.config import made_by
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig, Features, Shards
from maect.models.export import Card
from maect.records import EvaluationRecord, RunRecord, is_finished
from maect.report.tables import result_file
from maect.stages import STAGES
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
    """All that a run's card says beside the model, as far as its results folder knows.

    Args:
        run: folder of the run, with its resolved file; one imported by hand has none.
        licence: of the weights, as the hub calls it.
        repository: that the folder is for, USER/NAME on the hub.
        base_model: of the hub, that the weights come from; none: timm's, of weights of timm.

    Raises:
        UserError: a licence or a name that the hub does not take.
    """
    if licence is not None and licence not in HUB["licences"]:
        hint = did_you_mean(licence, HUB["licences"])
        raise UserError(f"--licence {licence}: none of the hub's; {hint}")
    for name in filter(None, (repository, base_model)):
        _check_name(name)
    labelled = STAGES[RunRecord.of(run).stage].labelled
    chain = list(reversed(_chain(run)))
    base = base_model or next(filter(None, (_of_timm(folder) for folder, _ in chain)), None)
    parts = {
        "Intended use": _use(labelled),
        "Data": _data(chain),
        "Training": _training(chain, base),
        "Results": _results(run),
        "Licence": _licence(chain, licence),
        "Citation": _citation(chain),
    }
    sections = "".join(f"## {title}\n\n{text}\n\n" for title, text in parts.items() if text)
    results, data = results_of(run), _hub_data(chain)
    return Card(labelled, licence, sections, results, repository, base, data)


def _check_name(name: str) -> None:
    """Refuse a name that no repository of the hub can have."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError("USER/NAME")
    except HFValidationError as error:
        raise UserError(f"{name}: no name of a repository on the hub: {error}") from None


def _chain(run: Path) -> list[tuple[Path, RunConfig]]:
    """The run, what it started from, and so on."""
    chain = []
    folder: Path | None = run
    while folder is not None and (folder / "config.yaml").exists():
        chain.append((folder, RunConfig.read(folder / "config.yaml")))
        folder = chain[-1][1].source
    return chain


def _data(chain: list[tuple[Path, RunConfig]]) -> str:
    folders = dict.fromkeys(config.shards for _, config in chain if config.shards is not None)
    lines = []
    for shards in folders:
        line = f"- `{shards.parent.name}`, split `{shards.name}`"
        if (shards / "index.json").exists():
            index = open_index(shards)
            line += f": {index.n:,} images"
            classes = len(index.class_names)
            line += f" in {classes:,} classes" if classes else " without classes"
        lines.append(line)
    return "\n".join(lines)


def _hub_data(chain: Sequence[tuple[Path, RunConfig]]) -> tuple[str, ...]:
    """Data sets of the hub that the chain was trained on: ImageNet, by its kind and its classes."""
    for folder in (config.shards for _, config in chain if config.shards is not None):
        origin = made_by(folder) if (folder / "index.json").exists() else None
        whole = origin is not None and origin.kind in ("imagenet", "imagenet_train_tar")
        if whole and len(open_index(folder).class_names) == 1000:
            return (IMAGENET,)
    return ()


def _of_timm(run: Path) -> str | None:
    """The repository of the weights of timm that a run imported."""
    weights = RunRecord.of(run).weights if is_finished(run) else None
    return f"timm/{weights.timm}" if weights and weights.timm else None


def _use(labelled: bool) -> str:
    """Return what the weights are for, and what they are not for."""
    learnt = "with labels" if labelled else "without labels"
    return f"""Vectors of images like those under *Data*: nearest neighbours, groups, a linear
classifier, or further training. The encoder learnt {learnt} from them. Test it on your own images
before you rely on it. It is not meant to identify people, nor for decisions about them."""


def _training(chain: list[tuple[Path, RunConfig]], base: str | None) -> str:
    if not chain:
        return ""
    lines = [
        "| run | stage | recipe | epochs | images a batch |",
        "| --- | --- | --- | --- | --- |",
    ]
    for folder, config in chain:
        settings = config.settings.model_dump()
        cells: list[Any] = [folder.name, config.stage, config.recipe]
        cells += [settings.get(key) for key in ("epochs", "batch_size")]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    if base:
        lines += ["", f"The weights that it starts from are those of `{base}`."]
    return "\n".join(lines)


def _citation(chain: Sequence[tuple[Path, RunConfig]]) -> str:
    """BibTeX of the methods of the chain."""
    known = HUB["citations"]
    cited = [known[config.stage] for _, config in chain if config.stage in known]
    return "\n".join(["```bibtex", *dict.fromkeys(cited), "```"]) if cited else ""


def results_of(run: Path) -> "tuple[EvalResult, ...]":
    """The named numbers of this encoder's evaluations (`HUB`), as the hub has them.

    Scores of encoders that were fine-tuned from it are theirs, and are left out.
    """
    found = [*_of_classifier(run)]
    for path, result in _evaluations(run):
        known = HUB["metrics"].get(path.stem.partition(".on.")[0], {})
        for key, value in result.metrics.items():
            named = known.get(key) or known.get("*")
            data, split = _measured_on(path, result, key) if named else ("", "")
            if named and data and isinstance(value, float):
                found.append(_result(*named, data, split, value))
    return tuple(found)


def _of_classifier(run: Path) -> "Iterator[EvalResult]":
    """Accuracy of a fine-tuned run with its own classifier, after its last epoch."""
    scores = RunRecord.of(run).scores
    test = RunConfig.read(run / "config.yaml").test if (run / "config.yaml").exists() else None
    if scores and test is not None:
        named = "image-classification", "accuracy", "Accuracy"
        yield _result(*named, test.parent.name, test.name, scores.accuracies[-1])


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
    """Data set and split of a metric, by the inputs of the resolved file; empty: of no images."""
    written = path.with_suffix(".yaml")
    if not written.exists():  # made by hand
        return "unknown", result.settings.get("test_split", "")
    config = EvaluationConfig.read(written)
    inputs = config.settings.inputs()
    name = metric if metric in inputs else "test"  # several test sets: a metric for each
    kind = inputs.get(name)
    if isinstance(kind, Features):
        return config.paths(name)[0].stem.removesuffix(f"-{kind.split}"), kind.split
    if isinstance(kind, Shards):
        return config.paths(name)[0].parent.name, kind.split
    return "", ""


def _evaluations(run: Path) -> list[tuple[Path, EvaluationRecord]]:
    """The results that are of the encoder that the run has now."""
    evaluations = run.parent.parent / "evaluations"
    names = sorted(path.stem for path in (evaluations / run.name).glob("*.json"))
    files = (result_file(evaluations, run.name, name) for name in names)
    return [(path, EvaluationRecord.read(path)) for path in files if path is not None]


def _results(run: Path) -> str:
    """The same numbers as a table, and what the test split of each was used for."""
    lines = [
        f"| {one.metric_name} | {one.dataset_name} | {one.dataset_split or ''} "
        f"| {one.metric_value:.4g} |"
        for one in results_of(run)
    ]
    used = [(path.stem, r.provenance.get("test_data")) for path, r in _evaluations(run)]
    notes = [f"- {name}: {text}" for name, text in used if text]
    if not lines:
        return ""
    head = ["| number | data | split | value |", "| --- | --- | --- | ---: |"]
    return "\n".join([*head, *lines, *(["", *notes] if notes else [])])


def _licence(chain: list[tuple[Path, RunConfig]], licence: str | None) -> str:
    if licence is not None:
        return licence
    imported = [config.weights.name for _, config in chain if config.weights is not None]
    origin = f", and by that of the published `{imported[0]}`" if imported else ""
    return (
        f"None is stated. What these weights may be used for depends on that of the images{origin}."
    )
