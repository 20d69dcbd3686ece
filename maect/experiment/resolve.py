"""The jobs of an experiment: what each is told, reads and leaves."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from maect.core.settings import SettingsFile
from maect.evaluate import EvaluationConfig, Features, Input, Left, Shards, Trained
from maect.evaluate.explore import Explore
from maect.experiment.expand import Run, run_to_score
from maect.experiment.load import Experiment
from maect.report.configs import (
    ClaimsConfig,
    ImagesConfig,
    ReportConfig,
    Row,
    ShownConfig,
    SummaryConfig,
)
from maect.report.groups import Groups
from maect.report.registry import FIGURES, TABLES, Figure, Table, can_show
from maect.stages.run import RunConfig

AUDIT = "audit.json"
"""What `maect audit` finds, in the results folder."""


def run_config(experiment: Experiment, name: str) -> RunConfig:
    """All that a training or an import is told."""
    run = experiment.runs[name]
    scored = run.scored_by is not None
    stated = experiment.datasets[run.dataset].resize
    return RunConfig(
        run=name,
        stage=run.stage,
        recipe=run.recipe,
        size=run.size,
        seed=run.seed,
        shards=experiment.shards(run.dataset, run.split) if run.settings.trains else None,
        source=experiment.folder(run.source) if run.source else None,
        weights=run.weights,
        test=scored_on(experiment, run) if scored else None,
        resize=resize(experiment, str(run.source), run.dataset) if scored else stated,
        encoder=run.encoder,
        settings=run.settings,
        look=experiment.spec.look if run.settings.trains else None,
    )


def scored_on(experiment: Experiment, run: Run) -> Path:
    """Shards that a run is scored on which is trained for an evaluation."""
    split = experiment.evaluation(str(run.source), str(run.scored_by)).test_split
    return experiment.shards(experiment.default_dataset, split)


def evaluation_config(experiment: Experiment, run: str, name: str) -> EvaluationConfig:
    """All that a protocol is told."""
    settings = experiment.evaluation(run, name)
    return EvaluationConfig(
        evaluation=name,
        protocol=settings.name,
        run=experiment.folder(run),
        resize=resize(experiment, run, experiment.default_dataset),
        inputs={
            key: input_path(experiment, run, name, kind) for key, kind in settings.inputs().items()
        },
        settings=settings,
    )


def resize(experiment: Experiment, run: str, dataset: str) -> int | None:
    """Shorter side of a dataset's images, where it says none that of what the run is trained on.

    One that is trained for an evaluation sees images as its source does.
    """
    about = experiment.runs[run]
    trained_on = experiment.runs[str(about.source)] if about.scored_by else about
    own = experiment.datasets[trained_on.dataset].resize
    return experiment.datasets[dataset].resize or own


def resize_stated(experiment: Experiment, run: str, dataset: str) -> int:
    """The same as a number, also where neither says one."""
    default = experiment.runs[run].encoder.default_resize
    return resize(experiment, run, dataset) or default


WITHOUT_NORM = ".before_norm"
"""Behind a split's name: its features before the encoder's final norm."""


def features_file(experiment: Experiment, run: str, dataset: str, split: Features) -> Path:
    """Features of a split, made with a run's encoder."""
    name = split.split if split.norm else f"{split.split}{WITHOUT_NORM}"
    return experiment.root / "features" / run / f"{dataset}-{name}.safetensors"


def input_path(experiment: Experiment, run: str, name: str, kind: Input) -> Path | list[Path]:
    """Where an input of an evaluation is: a file, a folder of shards, or folders of runs."""
    dataset = experiment.default_dataset
    match kind:
        case Features():
            return features_file(experiment, run, dataset, kind)
        case Shards(split):
            return experiment.shards(dataset, split)
        case Left(evaluation):
            return experiment.root / "evaluations" / run / f"{evaluation}.safetensors"
        case Trained(parts):
            return [experiment.folder(run_to_score(run, name, part)) for part in parts]


def read_by_run(experiment: Experiment, name: str) -> list[Path]:
    """Files that a training needs before it can start."""
    run = experiment.runs[name]
    shards = [experiment.shards(run.dataset, run.split) / "index.json"]
    if run.scored_by is not None:
        shards.append(scored_on(experiment, run) / "index.json")
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


def figures(experiment: Experiment) -> list[str]:
    """The figures that have anything to show, where less is evaluated than the file asks for."""
    return [name for name in experiment.figures if _can_show(experiment, name, figure=True)]


def tables(experiment: Experiment) -> list[str]:
    """Likewise the tables; one of a figure's name has the numbers behind it, for the claims."""
    names = [name for name in experiment.tables if _can_show(experiment, name, figure=False)]
    return [*names, *(name for name in figures(experiment) if name in TABLES)]


def _can_show(experiment: Experiment, name: str, figure: bool) -> bool:
    rows = experiment.rows(name)
    return not experiment.partial or can_show(name, figure, rows, experiment.asked)


def shown_config(experiment: Experiment, name: str, figure: bool) -> ShownConfig:
    """All that a table or figure is told."""
    return ShownConfig(
        name=name,
        rows=experiment.rows(name),
        evaluations=experiment.root / "evaluations",
        runs=experiment.root / "runs",
        compare_with_paper=experiment.spec.compare_with_paper,
        classes=_classes(experiment, name) if figure else None,
        groups=_groups(experiment, name) if figure else None,
    )


def claims_config(experiment: Experiment) -> ClaimsConfig:
    """All that the claims are told."""
    names = tables(experiment)
    rows = dict.fromkeys(row for name in names for row in experiment.rows(name))
    return ClaimsConfig(
        tables=[experiment.root / "tables" / f"{name}.csv" for name in names],
        rows=list(rows),
        runs=experiment.root / "runs",
        images={
            split: experiment.shards(dataset, split) / "index.json"
            for dataset, split in experiment.splits
            if dataset == experiment.default_dataset
        },
    )


def read_by_summary(experiment: Experiment) -> dict[str, Path]:
    """Files that the first page of the report shows, by what they are."""
    files = {}
    for kind, names, ending in (
        ("table", tables(experiment), "csv"),
        ("figure", figures(experiment), "png"),
    ):
        if names:
            files[kind] = experiment.root / f"{kind}s" / f"{names[0]}.{ending}"
    if compares(experiment):
        files["claims"] = experiment.root / "claims.csv"
    if left := explored(experiment):
        files["explored"] = left[-1]
    return files


def compares(experiment: Experiment) -> bool:
    """Whether there are claims to decide."""
    return bool(experiment.spec.compare_with_paper and tables(experiment))


def explored(experiment: Experiment) -> list[Path]:
    """What the protocol `explore` leaves of each run, for the page to look through images."""
    return [
        experiment.root / "evaluations" / run / f"{name}.safetensors"
        for run, name in experiment.evaluations
        if experiment.protocols[name] == Explore.name
    ]


def read_by_images(experiment: Experiment) -> list[Path]:
    """Files that the page of images reads; pairs that look alike only once somebody has asked."""
    audit = experiment.root / AUDIT
    return [*explored(experiment), *([audit] if audit.exists() else [])]


def images_config(experiment: Experiment) -> ImagesConfig:
    """All that the page to look through images is told."""
    audit = experiment.root / AUDIT
    return ImagesConfig(name=experiment.name, explored=explored(experiment), audit=audit)


def summary_config(experiment: Experiment) -> SummaryConfig:
    """All that the first page of the report is told."""
    given = read_by_summary(experiment)
    own = [run for run in experiment.evaluated if experiment.runs[run].scored_by is None]
    if own and not experiment.spec.compare_with_paper:
        given["run"] = experiment.folder(own[-1])
        given["images"] = experiment.images(experiment.default_dataset, "train")
    classifies = "run" in given and (own[-1], "linear_probe") in experiment.evaluations
    description = experiment.spec.description
    return SummaryConfig(
        name=experiment.name, description=description, classifies=classifies, **given
    )


def read_by_shown(experiment: Experiment, name: str, figure: bool) -> list[Path]:
    """Files that a table or figure reads, of those that the experiment makes."""
    shown = FIGURES[name] if figure else TABLES[name]
    files = [
        experiment.root / "evaluations" / run / f"{evaluation}.json"
        for run, evaluation in _evaluations(experiment, name, shown)
    ]
    if shown.reads_runs:
        files += _records(experiment, [_runs(row, shown) for row in experiment.rows(name)])
    if figure and (classes := _classes(experiment, name)):
        files.append(classes)
    return files


def run_records(experiment: Experiment, names: list[str]) -> list[Path]:
    """Completion records of the runs in tables and figures and of all that they start from."""
    return _records(experiment, [row.runs for name in names for row in experiment.rows(name)])


def _records(experiment: Experiment, rows: list[tuple[str, ...]]) -> list[Path]:
    runs = list(itertools.chain.from_iterable(rows))
    return [experiment.folder(run) / "run.json" for run in experiment.behind(runs)]


def _runs(row: Row, shown: Table | Figure) -> tuple[str, ...]:
    """Those of a line that a table or figure shows."""
    return row.runs[:1] if isinstance(shown, Figure) and shown.first_seed else row.runs


def _evaluations(
    experiment: Experiment, name: str, shown: Table | Figure
) -> Iterator[tuple[str, str]]:
    """Those that a table or figure reads and the experiment makes, as (run, name)."""
    for row in experiment.rows(name):
        for pair in itertools.product(_runs(row, shown), shown.reads(row.method)):
            if pair in experiment.asked:
                yield pair


def _classes(experiment: Experiment, name: str) -> Path | None:
    """The index that names the classes a figure shows, if it shows any."""
    shown = FIGURES[name]
    for pair in _evaluations(experiment, name, shown) if shown.names_classes else ():
        split = experiment.evaluation(*pair).test_split
        return experiment.shards(experiment.default_dataset, split) / "index.json"
    return None


def _groups(experiment: Experiment, name: str) -> Groups | None:
    """Groups of the classes, for a figure that shows them."""
    groups = experiment.datasets[experiment.default_dataset].groups
    return groups if FIGURES[name].groups_classes and _classes(experiment, name) else None


def read_by_report(experiment: Experiment) -> list[Path]:
    """Files that the report shows."""
    root = experiment.root
    return [
        *(root / "tables" / f"{name}.html" for name in tables(experiment)),
        *(root / "figures" / f"{name}.png" for name in figures(experiment)),
        *([root / "claims.csv", root / "claims.html"] if compares(experiment) else []),
        *([root / "images.html"] if explored(experiment) else []),
        root / "summary.html",
    ]


def shown(experiment: Experiment) -> Iterator[tuple[Path, SettingsFile, list[Path]]]:
    """The resolved file of each table, figure and page, with its path and what is made by it."""
    root = experiment.root
    for figure, kind, names, endings in (
        (False, "tables", tables(experiment), ("csv", "md", "tex", "html")),
        (True, "figures", figures(experiment), ("pdf", "png")),
    ):
        for name in names:
            outputs = [root / kind / f"{name}.{ending}" for ending in endings]
            yield outputs[0].with_suffix(".yaml"), shown_config(experiment, name, figure), outputs
    claims = [root / "claims.csv", root / "claims.html"]
    yield root / "claims.yaml", claims_config(experiment), claims
    if explored(experiment):
        yield root / "images.yaml", images_config(experiment), [root / "images.html"]
    yield root / "summary.yaml", summary_config(experiment), [root / "summary.html"]
    shows = ReportConfig(shown=read_by_report(experiment))
    yield root / "report.yaml", shows, [root / "report.html"]


def files(experiment: Experiment) -> Iterator[tuple[Path, SettingsFile]]:
    """The resolved file of every run, evaluation, table, figure and page, by path."""
    for run in experiment.runs:
        yield experiment.folder(run) / "config.yaml", run_config(experiment, run)
    for run, name in experiment.evaluations:
        path = experiment.root / "evaluations" / run / f"{name}.yaml"
        yield path, evaluation_config(experiment, run, name)
    for path, told, _ in shown(experiment):
        yield path, told
