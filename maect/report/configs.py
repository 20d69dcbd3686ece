"""Resolved files of tables, figures and pages, and the groups of classes that they may name.

`tables/NAME.yaml`, `figures/NAME.yaml`, and `claims`, `datasets`, `images` and `report` with that
ending.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, StringConstraints

from maect.core.errors import UserError
from maect.core.files import need
from maect.core.settings import LocalPath
from maect.core.stamps import (
    Checksums,
    StampedFile,
    file_checksum,
    known_record,
    record_checksum,
)
from maect.core.yaml_files import read_yaml
from maect.records import seed_of

Name = Annotated[str, StringConstraints(min_length=1)]


def _apart(groups: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    seen: dict[str, str] = {}
    for group, classes in groups.items():
        for name in classes:
            if seen.setdefault(name, group) != group:
                raise ValueError(f"class {name!r} is in {seen[name]!r} and in {group!r}")
    return groups


Groups = Literal["imagenet"] | Annotated[dict[str, list[str]], AfterValidator(_apart)]
"""Classes by the name of their group, or the list of that name in this package."""


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """A line of a table or figure: a model, and the runs behind it, one a seed (none: not run)."""

    architecture: Name
    method: Name
    runs: tuple[str, ...]

    def of_seed(self, seed: int) -> "Row":
        """Return this line with the runs of one seed alone."""
        runs = tuple(run for run in self.runs if seed_of(run) == seed)
        return replace(self, runs=runs)


class PageConfig(StampedFile):
    """A page, which is made of the results that it names."""

    reads: tuple[LocalPath, ...] = ()
    """Records, tables and pictures: their checksums are in the page's stamp."""

    def made_of(self) -> Checksums:
        """Return the checksums of all that the page is made of."""
        return {path: _checksum(path) for path in self.reads}


def _checksum(path: Path) -> str | None:
    """Return the checksum of a record, tensors or another file; None if it is gone."""
    if path.suffix == ".safetensors":  # the tensors of an evaluation
        return known_record(path.with_suffix(".json")).get("left_sha256")
    return record_checksum(path) if path.suffix == ".json" else file_checksum(path)


class ShownConfig(PageConfig):
    """A table or a figure: `tables/NAME.yaml`, `figures/NAME.yaml`."""

    name: Name
    """Which, of `maect.report.registry`."""
    rows: list[Row]
    evaluations: LocalPath
    """Folder of the results."""
    runs: LocalPath
    """Folder of the runs, whose records and curves some figures show."""
    compare_with_paper: bool = True
    """Whether to show the paper's numbers; they are of ImageNet-1k."""
    classes: LocalPath | None = None
    """Index of the shards that a figure reads: names of classes, and how many images there are."""
    groups: Groups | None = None
    """Groups of these classes, for a figure that shows them in place of the classes."""

    @classmethod
    def of_results(cls, path: Path) -> Self:
        """Read the file of a table or figure, of results that are there."""
        config = cls.read(path)
        if any(row.runs for row in config.rows):
            need(config.evaluations, f"folder of evaluations, which {path} names")
        return config


class ClaimsConfig(PageConfig):
    """The claims: `claims.yaml`."""

    tables: list[LocalPath]
    """CSV files; a table is known by its file's name, and by the resolved file beside it."""
    rows: list[Row]
    """Models whose cost is counted."""
    runs: LocalPath
    """Folder of the runs, whose records tell the cost."""
    images: dict[str, LocalPath]
    """Index of the shards of each split that is evaluated: how many images it has."""


class ImagesConfig(PageConfig):
    """The page to look through images: `images.yaml`."""

    name: Name
    """Of the experiment."""
    explored: list[LocalPath]
    """Output of the protocol `explore` for each run, the last one first on the page."""
    duplicates: LocalPath | None = None
    """Pairs that look alike, and of which images, as `maect duplicates RUN` writes them."""


class DatasetsConfig(PageConfig):
    """The page of several data sets: `datasets.yaml`."""

    name: Name
    """Of the experiment."""
    runs: list[Name]
    datasets: dict[Name, str]
    """Suffix of evaluations' names on each data set; empty for the first."""
    measures: dict[Name, dict[Name, str]]
    """Titles of what is shown, by evaluation and metric."""
    evaluations: LocalPath
    """Folder of the results."""


class ReportConfig(PageConfig):
    """The report: `report.yaml`."""

    name: Name
    """Of the experiment."""
    description: str = ""
    tables: tuple[LocalPath, ...] = ()
    """CSV of every table, each beside its resolved file."""
    stated: tuple[LocalPath, ...] = ()
    """Those of which the headline may state a number."""
    figures: tuple[LocalPath, ...] = ()
    """PNG of every figure, each beside its resolved file."""
    tested: LocalPath | None = None
    """Index of the split that they are of: the number of images decides their errors."""
    claims: LocalPath | None = None
    """CSV of the claims; none: the images are not the paper's."""
    datasets: LocalPath | None = None
    """CSV of several data sets, next to its resolved file."""
    images: LocalPath | None = None
    """Page to look through images."""
    explored: LocalPath | None = None
    """Result of the protocol `explore` of the last run, of which the report shows groups."""
    shards: LocalPath | None = None
    """Folder of a split's shards, of which the report shows some images."""
    run: LocalPath | None = None
    """Folder of the last run that is evaluated: the commands in the report use it."""
    folder: LocalPath | None = None
    """Folder of the images that it was trained on, as the commands name it."""
    classifies: bool = False
    """Whether that run has a linear probe, which `maect predict` needs."""


def group_names(groups: Groups) -> list[str]:
    """Return the names of all groups, in their order."""
    return list(_listed() if groups == "imagenet" else groups)


def group_numbers(groups: Groups, classes: Sequence[str], where: str) -> list[int]:
    """Return the number of each class's group; -1: none."""
    listed = _listed() if groups == "imagenet" else groups
    numbers = {name: number for number, group in enumerate(listed.values()) for name in group}
    for name in numbers:
        if groups != "imagenet" and name not in classes:
            raise UserError(f"groups: {where} has no class {name!r}")
    return [numbers.get(name, -1) for name in classes]


@cache
def _listed() -> dict[str, list[str]]:
    return read_yaml(Path(__file__).with_name("imagenet_groups.yaml"))
