"""What a table, a figure or the claims are told: one file each, beside what is made of it."""

from typing import Annotated

from pydantic import ConfigDict, StringConstraints
from pydantic.dataclasses import dataclass

from maect.core.settings import LocalPath, SettingsFile, later
from maect.report.groups import Groups

Name = Annotated[str, StringConstraints(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """A line of a table or figure: a model, and the runs behind it, one a seed (none: not run)."""

    architecture: Name
    method: Name
    runs: tuple[str, ...]


class ShownConfig(SettingsFile):
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
    """Index of shards that names the classes, for a figure that shows them."""
    groups: Groups | None = later(None)
    """Groups of these classes, for a figure that shows them in place of the classes."""


class ClaimsConfig(SettingsFile):
    """The claims: `claims.yaml`."""

    tables: list[LocalPath]
    """CSV files; a table is known by its file's name."""
    rows: list[Row]
    """Models whose cost is counted."""
    runs: LocalPath
    """Folder of the runs, whose records tell the cost."""
