"""What a model card says beside the model: data, training, results, licence."""

from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import read_json
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig, Features, Shards
from maect.report.tables import result_file
from maect.stages.run import RunConfig


def card_sections(run: Path, licence: str | None = None) -> str:
    """Sections of a run's model card, in Markdown, as far as its results folder knows.

    Args:
        run: folder of the run, with its resolved file; one imported by hand has none.
        licence: of the weights, as the hub calls it.
    """
    chain = list(reversed(_chain(run)))
    parts = {
        "Data": _data(chain),
        "Training": _training(chain),
        "Results": _results(run),
        "Licence": _licence(chain, licence),
    }
    return "".join(f"## {title}\n\n{text}\n\n" for title, text in parts.items() if text)


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


def _training(chain: list[tuple[Path, RunConfig]]) -> str:
    lines = [
        "| run | stage | recipe | epochs | images a batch |",
        "| --- | --- | --- | --- | --- |",
    ]
    for folder, config in chain:
        settings = config.settings.model_dump()
        cells: list[Any] = [folder.name, config.stage, config.recipe]
        cells += [settings.get(key) for key in ("epochs", "batch_size")]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) if chain else ""


def results_of(run: Path) -> tuple[dict[str, Any], ...]:
    """What the section "Results" has of images, as the hub's `model-index` holds it."""
    return tuple(
        {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": data} | ({"split": split} if split else {}),
            "metrics": [{"type": key, "name": f"{name}: {key}", "value": round(value, 4)}],
        }
        for name, key, data, split, value in _numbers(run)
        if data
    )


def _measured_on(path: Path, result: dict[str, Any], metric: str) -> tuple[str, str]:
    """Data set and split of a metric, by the inputs of the resolved file; empty: of no images."""
    told = path.with_suffix(".yaml")
    if told.exists():  # else of a revision without resolved files, or made by hand
        try:
            config = EvaluationConfig.read(told)
            inputs = config.settings.inputs()
            name = metric if metric in inputs else "test"  # several test sets: a metric for each
            kind = inputs.get(name)
            if isinstance(kind, Features):
                return config.paths(name)[0].stem.removesuffix(f"-{kind.split}"), kind.split
            if isinstance(kind, Shards):
                return config.paths(name)[0].parent.name, kind.split
            return "", ""
        except (UserError, KeyError):  # of another version
            pass
    return "unknown", result["settings"].get("test_split", "")


def _numbers(run: Path) -> list[tuple[str, str, str, str, float]]:
    """Evaluation, name, data set, split and value of every single number of the evaluations."""
    return [
        (path.stem, key, *_measured_on(path, result, key), value)
        for path, result in _evaluations(run)
        for key, value in result["metrics"].items()
        if isinstance(value, float)
    ]


def _evaluations(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The results that are of the encoder that the run has now."""
    evaluations = run.parent.parent / "evaluations"
    names = sorted(path.stem for path in (evaluations / run.name).glob("*.json"))
    files = (result_file(evaluations, run.name, name) for name in names)
    return [(path, read_json(path)) for path in files if path is not None]


def _results(run: Path) -> str:
    """Every single number of the run's evaluations, and what its test split was used for."""
    lines = [f"| {' | '.join(where)} | {value:.4g} |" for *where, value in _numbers(run)]
    used = [(path.stem, r["provenance"].get("test_data")) for path, r in _evaluations(run)]
    notes = [f"- {name}: {text}" for name, text in used if text]
    if not lines:
        return ""
    head = ["| evaluation | number | data | split | value |", "| --- | --- | --- | --- | ---: |"]
    return "\n".join([*head, *lines, *(["", *notes] if notes else [])])


def _licence(chain: list[tuple[Path, RunConfig]], licence: str | None) -> str:
    if licence is not None:
        return licence
    imported = [config.weights.name for _, config in chain if config.weights is not None]
    origin = f", and by that of the published `{imported[0]}`" if imported else ""
    return (
        f"None is stated. What these weights may be used for depends on that of the images{origin}."
    )
