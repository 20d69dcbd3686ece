"""The demo's first look: before and after tuning, as a picture and a table, within a minute.

One job does it all. Its pre-training and head are the pipeline's own, which goes on from there;
tuning is shorter, in a folder of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

from maect.core.context import Context
from maect.core.files import atomic_write, make_folder, read_json, write_json
from maect.core.settings import digest, validated
from maect.core.stamps import stamped
from maect.data.config import CONFIG
from maect.data.sources import BUNDLED
from maect.evaluate import load_evaluation
from maect.evaluate.base import EvaluationJob
from maect.experiment import resolve
from maect.experiment.chosen_shards import note_own
from maect.experiment.load import Experiment
from maect.launch import Resources, Task, launch

if TYPE_CHECKING:
    from maect.evaluate.store import FeatureFile

BEFORE = "mae_tiny"
HEAD = "head_min_tiny"
AFTER = "ct_min_tiny"
EPOCHS = {AFTER: 12}
"""Of what is shorter than in the pipeline, which tunes for 25."""
NUMBERS = "first_look.json"
COLUMNS = {
    "k-NN": ("knn", "knn"),
    "1 shot": ("low_shot", "low_shot_1"),
    "5 shot": ("low_shot", "low_shot_5"),
}
"""Evaluation and metric by their titles; accuracy in percent of the validation images."""


def first_look(chosen: Experiment, epochs: Mapping[str, int] = EPOCHS) -> Path:
    """Make and return a folder `first_look` in the results folder of the experiment `digits`.

    It has `first_look.png` and its numbers. `epochs`, by run, replace the experiment's.

    Raises:
        LaunchError: the job failed.
    """
    out = chosen.root / "first_look"
    (dataset,) = chosen.datasets
    _shard(chosen, dataset)
    runs = {name: chosen.folder(name) for name in (BEFORE, HEAD)} | {AFTER: out / "runs" / AFTER}
    configs = {}
    for name, folder in runs.items():
        config = resolve.run_config(chosen, name)
        if name in epochs:
            settings = config.settings.model_dump() | {"epochs": epochs[name]}
            config = config.model_copy(
                update={"settings": validated(type(config.settings), settings, name)}
            )
        config.write(folder / "config.yaml")
        configs[folder / "config.yaml"] = config
    identity = digest([config.digest for config in configs.values()])
    given = {
        "runs": [str(folder) for folder in runs.values()],
        "shards": [str(chosen.shards(dataset, split)) for split in ("train", "val")],
        "identity": identity,
    }
    launch(
        Task("maect.tools.first_look:on_ranks", given, identity),
        out, Resources.parse(nodes=1, devices="auto"),
        is_done=lambda: read_json(out / NUMBERS, {}).get("identity") == identity,
        describe="first look",
    )  # fmt: skip
    for path, config in configs.items():
        with stamped(path, config):  # the pipeline goes on from there
            pass
    return out


def _shard(chosen: Experiment, dataset: str) -> None:
    """Write the bundled images and their shards, as the pipeline would."""
    from maect.data.shards import shard

    images = chosen.root / "images" / dataset
    if not all((images / split).exists() for split in ("train", "val")):
        resolve_name(BUNDLED[dataset])(images)
    for split in ("train", "val"):
        own = chosen.own_shards(dataset, split)
        if not (own / "index.json").exists():
            make_folder(own)
            config = chosen.shards_config(dataset, split)
            note_own(own, config)
            with stamped(own / CONFIG, config):
                shard(config.images, own, config.kind, config.shards, **config.options)


def on_ranks(context: Context, *, runs: list[str], shards: list[str], identity: str) -> str:
    """Train the runs one after the other; evaluate and draw the first and the last."""
    from maect.evaluate.features import extract
    from maect.evaluate.store import open_features
    from maect.stages.run import resize_of, train

    folders = [Path(run) for run in runs]
    for folder in folders:
        train(cast(Context, _Alone(context)), config=folder / "config.yaml")
    out = folders[-1].parents[1]
    shown = {}
    for run in (folders[0], folders[-1]):
        files = [
            out / "features" / run.name / f"{Path(split).name}.safetensors" for split in shards
        ]
        weights = run / "encoder.safetensors"
        resize = resize_of(run)
        for split, file in zip(shards, files, strict=True):
            extract(context, encoder=weights, shards=split, out=file, resize=resize)
        if context.rank == 0:
            shown[run.name] = _scores(context, run, *files), open_features(files[-1])
    if context.rank == 0:
        _draw(shown, out / "first_look.png")
        numbers = {name: scores for name, (scores, _) in shown.items()}
        write_json(out / NUMBERS, {"identity": identity, "scores": numbers})
    return "done"


class _Alone:
    """The context of one of several trainings in a job: it counts its own device time only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._before = context.held_seconds()

    def held_seconds(self) -> float:
        """Return seconds x ranks since this training began."""
        return self._context.held_seconds() - self._before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _scores(context: Context, run: Path, train: Path, test: Path) -> dict[str, float]:
    """Return accuracies in percent, by the titles of `COLUMNS`."""
    metrics: dict[str, Any] = {}
    for name in dict.fromkeys(evaluation for evaluation, _ in COLUMNS.values()):
        given = {"train": train, "test": test}
        job = EvaluationJob(run, test.with_name(f"{name}.json"), given)
        metrics[name] = load_evaluation(name, "tiny")[1].evaluate(context, job)
    return {title: metrics[name][key] for title, (name, key) in COLUMNS.items()}


def _draw(shown: Mapping[str, tuple[dict[str, float], "FeatureFile"]], png: Path) -> None:
    """Draw the validation images by their vectors, before and after, each class in its colour."""
    import numpy as np
    from sklearn.manifold import TSNE

    from maect.report.figures import blank, class_style, panels, styled

    with styled():
        figure, axes = panels(1, len(shown), 3.4)
        for when, one, (scores, file) in zip(
            ("Before", "After"), axes, shown.values(), strict=True
        ):
            vectors = file.all()
            vectors = (vectors - vectors.mean(0)) / (vectors.std(0) + 1e-6)
            points = TSNE(init="pca", random_state=0, max_iter=500).fit_transform(vectors)
            for number in np.unique(file.labels):
                style = class_style(int(number)) | {"s": 9, "linewidths": 0, "label": number}
                one.scatter(*points[file.labels == number].T, **style)
            one.set_title(f"{when} contrastive tuning: k-NN {scores['k-NN']:.0f} %")
            blank(one)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=10)
        with atomic_write(png) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})


def table(out: Path) -> str:
    """Return the scores that `first_look` wrote to a folder, a line for each encoder."""
    lines = [" " * 26 + "".join(f"{title:>9}" for title in COLUMNS)]
    names = "MAE", "MAE-CT, tuned briefly"
    for name, scores in zip(names, read_json(out / NUMBERS)["scores"].values(), strict=True):
        lines.append(f"  {name:<24}" + "".join(f"{scores[title]:9.1f}" for title in COLUMNS))
    return "\n".join(lines)
