"""Lists of labelled images: SimCLR's, MSN's, or your own under the same names."""

import os
from pathlib import Path
from typing import Self

from pydantic import Field

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.core.settings import ContentPath, Settings
from maect.paper import read_paper

OFFICIAL = read_paper("lists", dict[str, str])
"""SHA-256 of the lists for the paper's table 1, by their names in `maect retrieve`."""


def shots_list(folder: str, shots: int, split: int) -> Path:
    """Return the path of the list with `shots` images per class."""
    return _path(folder, f"msn_{shots}shot_split{split}.txt")


def fraction_list(folder: str, fraction: float) -> Path:
    """Return the path of the list with this fraction of the images."""
    return _path(folder, f"simclr_{100 * fraction:g}percent.txt")


def fraction_name(fraction: float) -> str:
    """Return the name of the metric: `low_shot_1pct` for 0.01."""
    return f"low_shot_{100 * fraction:g}pct"


def _path(folder: str, name: str) -> Path:
    return Path(os.path.expandvars(folder)).expanduser() / name


class FewLabels(Settings):
    """Settings of training and probing with few labels."""

    subsets: ContentPath | None = None
    """Folder of the official lists (`maect retrieve`); None: seeded subsets."""
    lists_sha256: dict[str, str] = Field(default_factory=dict)
    """Checksums of the lists when an experiment was read; not written by hand. A list without one
    must be the official list of its name."""

    @property
    def lists(self) -> list[Path]:
        """List files that are read."""
        return []

    def of_own_lists(self) -> Self:
        """Return these settings without checksums of lists that are not read."""
        own = {file.name for file in self.lists}
        kept = {name: sha256 for name, sha256 in self.lists_sha256.items() if name in own}
        return self.model_copy(update={"lists_sha256": kept})

    def check_lists(self) -> None:
        """Raise UserError if a list is not the one that the job was prepared with."""
        for file in self.lists:
            expected = self.lists_sha256.get(file.name) or OFFICIAL.get(file.name)
            found = checksum(file)
            if found is not None and found != expected:
                raise UserError(
                    f"{file}: not the list that this job was prepared with; the pipeline, started "
                    "again, or `maect resolve EXPERIMENT` prepares it with this one"
                )

    def read_lists(self) -> Self:
        """Return these settings with the present checksums of the lists that are there."""
        found = {file.name: checksum(file) for file in self.lists}
        known = {name: sha256 for name, sha256 in found.items() if sha256}
        return self.model_copy(update={"lists_sha256": known})


def checksum(file: Path) -> str | None:
    """Return the sha256 of a list; None if it cannot be read, which its reader reports."""
    try:
        return sha256_file(file)
    except OSError:
        return None
