"""The pages of an experiment's results: tables, figures, claims, data sets, images, the report.

Each kind has one entry in `PAGES`. One rule and one command, `maect page`, make all of them from
their resolved files: `tables/NAME.yaml`, `figures/NAME.yaml`, `claims.yaml`, `datasets.yaml`,
`images.yaml`; and `report.yaml`, whose page shows all others.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from maect.core.errors import UserError
from maect.core.stamps import stamp_path, stamped
from maect.evaluate.protocols.stored_features import Explore
from maect.experiment.load import Experiment
from maect.records import RunRecord
from maect.report import configs
from maect.report.configs import Groups, Row
from maect.report.registry import FIGURES, TABLES, Figure, Table

DUPLICATES = "duplicates.json"
"""Output of `maect duplicates RUN`, in the results folder."""


@dataclass(frozen=True)
class Page:
    """A kind of page.

    Attributes:
        name: of the kind and of its rule.
        title: of a page, with `{page}` for its name.
        make: `MODULE:FUNCTION` that makes a page of the path of its resolved file.
        kind: class of the resolved files.
        names: names of an experiment's pages of this kind.
        settings: of a page, without the files that it reads.
        inputs: files that a page reads, of those that the experiment makes.
        category: where Snakemake's own report lists them.
        endings: of the files that are written; the last one is shown in that report.
        folder: where they lie in the results folder; empty: there is one such page, at its top.
    """

    name: str
    title: str
    make: str
    kind: type[configs.PageConfig]
    names: Callable[[Experiment], Sequence[str]]
    settings: Callable[[Experiment, str], configs.PageConfig]
    inputs: Callable[[Experiment, str], Sequence[Path]]
    category: str = "Summary"
    endings: tuple[str, ...] = ("html",)
    folder: str = ""

    def outputs(self, experiment: Experiment, name: str) -> list[Path]:
        """Files that are written for a page."""
        folder = experiment.root / self.folder
        return [folder / f"{name}.{ending}" for ending in self.endings]

    def config(self, experiment: Experiment, name: str) -> configs.PageConfig:
        """Return the content of a page's resolved file."""
        settings = self.settings(experiment, name)
        reads = tuple(path.absolute() for path in self.inputs(experiment, name))
        return settings.model_copy(update={"reads": reads})

    def config_path(self, experiment: Experiment, name: str) -> Path:
        """Return where a page's resolved file is."""
        return experiment.root / self.folder / f"{name}.yaml"


HEADLINE_TABLES = ("low_shot", "clustering")


def figures(experiment: Experiment) -> list[str]:
    """Return the figures that can show anything, if only a part of the experiment is evaluated."""
    return [name for name in experiment.figures if _can_show(experiment, name, FIGURES[name])]


def tables(experiment: Experiment) -> list[str]:
    """Return the tables that can show anything; one named as a figure serves the claims."""
    names = [name for name in experiment.tables if _can_show(experiment, name, TABLES[name])]
    return [*names, *(name for name in figures(experiment) if name in TABLES)]


def _can_show(experiment: Experiment, name: str, shown: Table | Figure) -> bool:
    """Return whether any evaluation fills a table or figure."""
    if not experiment.partial or (isinstance(shown, Figure) and not shown.needs):
        return True
    return any(
        (run, need) in experiment.asked
        for row in experiment.rows(name)
        for run in row.runs
        for need in (shown.needs if isinstance(shown, Figure) else shown.reads(row.method))
    )


def shown_config(experiment: Experiment, name: str, figure: bool) -> configs.ShownConfig:
    """Return the settings of a table or figure."""
    return configs.ShownConfig(
        name=name,
        rows=experiment.rows(name),
        evaluations=experiment.root / "evaluations",
        runs=experiment.root / "runs",
        compare_with_paper=experiment.spec.compare_with_paper,
        classes=_classes(experiment, name) if figure else None,
        groups=_groups(experiment, name) if figure else None,
    )


def claims_config(experiment: Experiment, name: str) -> configs.ClaimsConfig:
    """Return the settings of the claims."""
    names = tables(experiment)
    rows = dict.fromkeys(row for name in names for row in experiment.rows(name))
    data = experiment.default_dataset
    splits = {split: split for dataset, split in experiment.splits if dataset == data}
    if tested := _tested(experiment):
        splits["val"] = tested  # the claims call the test images so
    return configs.ClaimsConfig(
        tables=[experiment.root / "tables" / f"{name}.csv" for name in names],
        rows=list(rows),
        runs=experiment.root / "runs",
        images={
            name: experiment.shards(data, split) / "index.json" for name, split in splits.items()
        },
    )


def _tested(experiment: Experiment) -> str | None:
    """Return the split of the first data set that an evaluation is tested on, or None."""
    dataset = experiment.default_dataset
    for run, name in experiment.evaluations:
        split = experiment.evaluation(run, name).test_split
        if experiment.dataset_of(name) == dataset and split in experiment.datasets[dataset].splits:
            return split
    return None


def compares(experiment: Experiment) -> bool:
    """Return whether there are claims to decide."""
    return bool(experiment.spec.compare_with_paper and tables(experiment))


def _lists_numbers(experiment: Experiment) -> bool:
    """Return whether all numbers are listed: of several data sets, or of no table and no figure."""
    first = experiment.default_dataset
    several = any(experiment.dataset_of(name) != first for _, name in experiment.evaluations)
    shown = several or not (tables(experiment) or figures(experiment))
    return shown and bool(_measures(experiment))


def _measures(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Titles of the numbers of each evaluation, by evaluation and metric."""
    found: dict[str, dict[str, str]] = {}
    for run, name in experiment.evaluations:
        evaluation = name.removesuffix(experiment.evaluation_name("", experiment.dataset_of(name)))
        shown = experiment.evaluation(run, name).headline()
        found[evaluation] = found.get(evaluation, {}) | dict(shown)
    return {evaluation: shown for evaluation, shown in found.items() if shown}


def _datasets_config(experiment: Experiment, name: str) -> configs.DatasetsConfig:
    evaluated = {experiment.dataset_of(name) for _, name in experiment.evaluations}
    return configs.DatasetsConfig(
        name=experiment.name,
        runs=list(dict.fromkeys(run for run, _ in experiment.evaluations)),
        datasets={
            d: experiment.evaluation_name("", d) for d in experiment.datasets if d in evaluated
        },
        measures=_measures(experiment),
        evaluations=experiment.root / "evaluations",
    )


def _datasets_inputs(experiment: Experiment, name: str) -> list[Path]:
    """Results of all evaluations, of which the page shows those with a number."""
    return [
        experiment.root / "evaluations" / run / f"{name}.json"
        for run, name in experiment.evaluations
        if experiment.evaluation(run, name).headline()
    ]


def explored(experiment: Experiment) -> list[Path]:
    """Return the files of `explore` of each run, for the page to look through images."""
    return [
        experiment.root / "evaluations" / run / f"{name}.safetensors"
        for run, name in experiment.evaluations
        if experiment.protocols[name] == Explore.name
        and experiment.dataset_of(name) == experiment.default_dataset
    ]


def _images_inputs(experiment: Experiment, name: str) -> list[Path]:
    """Files that the page of images reads; pairs that look alike only once somebody has asked."""
    duplicates = experiment.root / DUPLICATES
    return [*explored(experiment), *([duplicates] if duplicates.exists() else [])]


def _images_config(experiment: Experiment, name: str) -> configs.ImagesConfig:
    return configs.ImagesConfig(
        name=experiment.name,
        explored=explored(experiment),
        duplicates=experiment.root / DUPLICATES,
    )


def inputs_of_shown(experiment: Experiment, name: str, figure: bool) -> list[Path]:
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


def _claims_inputs(experiment: Experiment, name: str) -> list[Path]:
    """Tables, and the records of the runs in them and of all that these start from."""
    names = tables(experiment)
    records = _records(experiment, [row.runs for table in names for row in experiment.rows(table)])
    return [*records, *(experiment.root / "tables" / f"{table}.csv" for table in names)]


def _records(experiment: Experiment, rows: list[tuple[str, ...]]) -> list[Path]:
    runs = list(itertools.chain.from_iterable(rows))
    return [RunRecord.path(experiment.folder(run)) for run in experiment.with_ancestors(runs)]


def _runs(row: Row, shown: Table | Figure) -> tuple[str, ...]:
    """Return the runs of a line that a table or figure shows."""
    return row.runs[:1] if isinstance(shown, Figure) and shown.first_seed else row.runs


def _evaluations(
    experiment: Experiment, name: str, shown: Table | Figure
) -> Iterator[tuple[str, str]]:
    """Return the evaluations that a page reads and the experiment makes, as (run, name)."""
    for row in experiment.rows(name):
        for pair in itertools.product(_runs(row, shown), shown.reads(row.method)):
            if pair in experiment.asked:
                yield pair


def _classes(experiment: Experiment, name: str) -> Path | None:
    """Return the index of the split whose classes a figure names or whose labels it counts."""
    shown = FIGURES[name]
    if not (shown.names_classes or shown.counts_labels):
        return None
    for pair in _evaluations(experiment, name, shown):
        evaluation = experiment.evaluation(*pair)
        split = evaluation.train_split if shown.counts_labels else evaluation.test_split
        return experiment.shards(experiment.default_dataset, split) / "index.json"
    return None


def _groups(experiment: Experiment, name: str) -> Groups | None:
    groups = experiment.datasets[experiment.default_dataset].groups
    return groups if FIGURES[name].groups_classes and _classes(experiment, name) else None


def shown_evaluations(experiment: Experiment) -> list[Path]:
    """Return the evaluations that tables and figures show."""
    inputs = (
        page.inputs(experiment, name)
        for page in PAGES.values()
        if page.folder
        for name in page.names(experiment)
    )
    folder = experiment.root / "evaluations"
    return [file for files in inputs for file in files if folder in file.parents]


def report_inputs(experiment: Experiment) -> list[Path]:
    """Return the files that the report shows; where nothing is evaluated, also all runs' stamps."""
    shown = [
        page.outputs(experiment, name)[-1]
        for page in PAGES.values()
        for name in page.names(experiment)
    ]
    runs = () if experiment.evaluations else experiment.runs
    return shown + [stamp_path(experiment.folder(run) / "config.yaml") for run in runs]


def report_config(experiment: Experiment) -> configs.ReportConfig:
    """Return the resolved file of the report."""
    names = tables(experiment)
    csv = {name: experiment.root / f"tables/{name}.csv" for name in names}
    stated = [name for name in names if name in HEADLINE_TABLES] or names[:1]
    dataset = experiment.default_dataset
    splits = experiment.datasets[dataset].splits
    given: dict[str, Any] = {}
    if compares(experiment):
        given["claims"] = experiment.root / "claims.csv"
    if _lists_numbers(experiment):
        given["datasets"] = experiment.root / "datasets.csv"
    if left := explored(experiment):
        given |= {"images": experiment.root / "images.html", "explored": left[-1]}
    split = _tested(experiment)
    if split is not None:
        given["tested"] = experiment.shards(dataset, split) / "index.json"
    figure_files = [experiment.root / f"figures/{name}.png" for name in figures(experiment)]
    reads = [*csv.values(), *figure_files, *given.values()]
    if split is not None and splits[split].source.sharded:  # a view has no files of its own
        given["shards"] = given["tested"].parent
    own = [run for run in experiment.evaluated if experiment.runs[run].scored_by is None]
    if own and not experiment.spec.compare_with_paper:
        given["run"] = experiment.folder(own[-1])
        trained_on = "train" if "train" in splits else next(iter(splits))
        given["folder"] = experiment.images(dataset, trained_on)
        given["classifies"] = (own[-1], "linear_probe") in experiment.evaluations
    return configs.ReportConfig(
        name=experiment.name,
        description=experiment.spec.description,
        tables=tuple(csv.values()),
        stated=tuple(csv[name] for name in stated),
        figures=tuple(figure_files),
        reads=tuple(reads),
        **given,
    )


def pages(experiment: Experiment) -> Iterator[tuple[Path, configs.PageConfig]]:
    """Yield the path and the resolved file of each page."""
    for page in PAGES.values():
        for name in page.names(experiment):
            yield page.config_path(experiment, name), page.config(experiment, name)
    yield experiment.root / "report.yaml", report_config(experiment)


def make_page(path: Path) -> None:
    """Make the page of a resolved file, which is known by its folder or its name, and its stamp."""
    if path.stem == "report":
        from maect.report.pages import make_report

        with stamped(path, configs.ReportConfig.read(path)):
            make_report(path)
        return
    for page in PAGES.values():
        place = path.absolute().parent.name if page.folder else path.stem
        if place == (page.folder or page.name):
            with stamped(path, page.kind.read(path)):
                resolve_name(page.make)(path)
            return
    places = ", ".join(
        f"{p.folder}/NAME.yaml" if p.folder else f"{p.name}.yaml" for p in PAGES.values()
    )
    raise UserError(
        f"{path}: not the resolved file of a page; they are {places} and report.yaml of a results "
        "folder"
    )


PAGES = {
    page.name: page
    for page in (
        Page(
            "table", "Table {page}", "maect.report.render:make_table",
            configs.ShownConfig,
            tables, partial(shown_config, figure=False), partial(inputs_of_shown, figure=False),
            "Tables", ("md", "tex", "csv"), "tables",
        ),
        Page(
            "figure", "Figure {page}", "maect.report.figures:make_figure",
            configs.ShownConfig,
            figures, partial(shown_config, figure=True), partial(inputs_of_shown, figure=True),
            "Figures", ("pdf", "dark.png", "png"), "figures",
        ),
        Page(
            "claims", "Claims", "maect.report.claims:make_claims",
            configs.ClaimsConfig,
            lambda e: ["claims"] if compares(e) else [], claims_config, _claims_inputs,
            endings=("csv",),
        ),
        Page(
            "datasets", "Data sets", "maect.report.pages:make_datasets",
            configs.DatasetsConfig,
            lambda e: ["datasets"] if _lists_numbers(e) else [], _datasets_config, _datasets_inputs,
            endings=("md", "csv"),
        ),
        Page(
            "images", "Page of images", "maect.report.pages:make_images",
            configs.ImagesConfig,
            lambda e: ["images"] if explored(e) else [], _images_config, _images_inputs,
        ),
    )
}  # fmt: skip
"""All kinds, in the order in which the report shows them."""
