"""Resolved file of a split's shards, and the shards that experiments share."""

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.core.settings import LocalPath, digest, validated
from maect.core.stamps import Checksums, StampedFile, known_record
from maect.data.sources.image_files import Folder
from maect.recipes import Pixels

CONFIG = "config.yaml"
TAKEN = "taken.json"
LISTS = ("labels", "only", "exclude", "classes")
"""Settings that may name files; their content counts, not where they are."""


class ShardsConfig(StampedFile):
    """Settings of a split's shards."""

    depth: ClassVar[int] = 3
    images: LocalPath
    """The source; of a view the shards whose classes it takes."""
    changed: str = ""
    """Digest of the times of the images' folders; empty for bundled images."""
    kind: str = Folder.kind
    """Kind of the source, one of `maect.data.sources`."""
    shards: int = Field(default=1, gt=0)
    labels: LocalPath | None = None
    only: LocalPath | None = None
    exclude: LocalPath | None = None
    classes: str | None = None
    """Name of a list of classes, or a file; for a view."""
    lists_sha256: dict[str, str] = Field(default={})
    """Checksums of the files that the settings above name."""
    skip_unreadable: bool = False
    shorter_side: int | None = Field(default=None, gt=0)
    pixels: Pixels = Pixels()

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `maect.data.shard_plan.plan_shards`."""
        names = ("labels", "only", "exclude", "skip_unreadable", "shorter_side", "pixels")
        return {name: getattr(self, name) for name in names}

    @property
    def content(self) -> dict[str, Any]:
        """Return all settings that decide on the shards' content, but the images themselves."""
        given = self.model_dump(mode="json", exclude={"images", "changed", "lists_sha256"})
        given["pixels"] = self.pixels.files
        return {key: value for key, value in (given | self.lists_sha256).items() if value}

    @property
    def asked(self) -> str:
        """Return the identity of the content."""
        return digest(self.content)

    def made_of(self) -> Checksums:
        """Return the checksum of the shards whose classes a view takes."""
        if self.classes is None:
            return {}
        index = self.images / "index.json"
        return {index: known_record(index).get("digest")}

    def result(self, path: Path) -> str | None:
        """Return the digest of the samples, if the index beside the file at `path` is whole."""
        whole = path.with_name("index.npy").exists()
        return known_record(path.with_name("index.json")).get("digest") if whole else None

    @property
    def source_identity(self) -> str:
        """Return the identity of the content, and of the images by their place and times."""
        return digest(self.content, str(self.images.resolve()), self.changed)


def made_by(shards: Path) -> ShardsConfig | None:
    """Return the config that shards were made by; None if it is missing or damaged."""
    path = shards / CONFIG
    try:
        status = path.stat()
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except (OSError, UserError):
        return None


def stated_pixels(text: str) -> dict[str, Any]:
    """Parse `--pixels`, words KEY=VALUE of `Pixels`.

    For example `range=0,4095 orientation=stored background=none`.

    Raises:
        UserError: another word, or `Pixels` refuses a value.
    """
    given: dict[str, Any] = {}
    for word in text.split():
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"--pixels {text}: write KEY=VALUE, such as range=0,4095")
        given[key] = _value(value)
    # Statistics are of an encoder: where only files are read, none are needed.
    channels = given.get("channels", 3)
    half = (0.5,) * channels if isinstance(channels, int) and channels != 3 else None
    validated(Pixels, {"mean": half, "std": half} | given, f"--pixels {text}")
    return given


def _value(text: str) -> Any:
    """Parse a value of `--pixels`: a number, several with commas, `none`, or a text."""
    if text == "none":
        return None
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        whole = [int(number) if number.is_integer() else number for number in numbers]
        return whole if "," in text else whole[0]
    return text


@cache
def _read(path: Path, changed: int, size: int) -> ShardsConfig:
    return ShardsConfig.read(path)


# --- Shards of other experiments ------------------------------------------------------------------
#
# Files in a split's folder say which shards the split has: config.yaml, written before sharding
# begins, what its own are made of; index.json, that they are finished; taken.json, that the split
# has begun with another experiment's.


def reused_shards(own: Path) -> Path | None:
    """Return the other experiment's shards that a split without its own has begun with, or None."""
    note = seek_record(own / TAKEN)
    if not note:
        return None
    for folder, made in finished_shards(own).items():
        # Shards of images that were edited in place have equal configs and other digests.
        if (made.source_identity, index_digest(folder)) == (note["made_of"], note["digest"]):
            return folder
    return None


def index_digest(shards: Path) -> str | None:
    """Return the identity of the content of finished shards; None of others."""
    return seek_record(shards / "index.json").get("digest")


def finished_shards(own: Path) -> dict[Path, ShardsConfig]:
    """Return folder and config of finished shards of every experiment for a split of this name.

    In a folder that everybody may write, such as /scratch, only your own and root's count.
    """
    root = own.parents[2]
    configs = sorted(root.parent.glob(f"*/shards/*/{own.name}/{CONFIG}"))
    folders = [path.parent for path in configs if (path.parent / "index.json").exists()]
    if folders and root.parent.stat().st_mode & stat.S_IWOTH:
        trusted = {root}
        for above in {folder.parents[2] for folder in folders}:
            if above.lstat().st_uid in (0, os.geteuid()):
                trusted.add(above)
        folders = [folder for folder in folders if folder.parents[2] in trusted]
    configs_by_folder = {folder: made_by(folder) for folder in folders}
    return {folder: made for folder, made in configs_by_folder.items() if made is not None}


def shards_of_features(features: Path, split: str) -> Path | None:
    """Return the shards that a features file of a results folder was computed from, or None."""
    for own in sorted(features.absolute().parent.parent.parent.glob(f"shards/*/{split}")):
        if f"{features.stem}.".startswith(f"{own.parent.name}-{split}."):
            return own if (own / "index.json").exists() else reused_shards(own)
    return None
