"""Resolved file of a split's shards: `shards/DATASET/SPLIT/config.yaml`."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from maect.core.errors import UserError
from maect.core.settings import LocalPath, digest, validated
from maect.core.stamps import Checksums, StampedFile, known_record
from maect.data.sources.image_files import Folder
from maect.recipes import Pixels

CONFIG = "config.yaml"
LISTS = ("labels", "only", "exclude", "classes")
"""Settings that may name files, whose content counts and not where they are."""


class ShardsConfig(StampedFile):
    """All settings of a split's shards."""

    depth: ClassVar[int] = 3
    images: LocalPath
    """The source; of a view the shards that it shows a part of."""
    changed: str = ""
    """Digest of when folders of the images were changed last; empty of bundled images."""
    kind: str = Folder.kind
    """Which of `maect.data.sources` the source is."""
    shards: int = Field(default=1, gt=0)
    labels: LocalPath | None = None
    only: LocalPath | None = None
    exclude: LocalPath | None = None
    classes: str | None = None
    """For a view: name of a list of classes, or a file."""
    lists_sha256: dict[str, str] = Field(default={})
    """Checksums of the files that the settings above name."""
    skip_unreadable: bool = False
    shorter_side: int | None = Field(default=None, gt=0)
    pixels: Pixels = Pixels()

    @property
    def options(self) -> dict[str, Any]:
        """The options of `maect.data.shards.plan_shards`."""
        names = ("labels", "only", "exclude", "skip_unreadable", "shorter_side", "pixels")
        return {name: getattr(self, name) for name in names}

    @property
    def content(self) -> dict[str, Any]:
        """Everything that decides what is in the shards, but the images themselves."""
        given = self.model_dump(mode="json", exclude={"images", "changed", "lists_sha256"})
        given["pixels"] = self.pixels.files
        return {key: value for key, value in (given | self.lists_sha256).items() if value}

    @property
    def asked(self) -> str:
        """Return the identity of the content."""
        return digest(self.content)

    def made_of(self) -> Checksums:
        """Return the checksum of the shards that a view shows a part of."""
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
        """Return the identity of the content and of where the images are and when they changed."""
        return digest(self.content, str(self.images.resolve()), self.changed)


def made_by(shards: Path) -> ShardsConfig | None:
    """Return the config that shards were made by; None where there is none, or a damaged one."""
    path = shards / CONFIG
    try:
        status = path.stat()
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except (OSError, UserError):
        return None


def stated_pixels(text: str | None) -> dict[str, Any]:
    """Read `--pixels`: words KEY=VALUE of `Pixels`, or JSON; UserError if it is neither.

    For example `range=0,4095 orientation=stored background=none`. Empty where it is not given.
    """
    given: dict[str, Any] = {}
    if text is None:
        return given
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UserError(f"--pixels {text}: {error}") from None
    for word in text.split() if not given else ():
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
    """Return a word of `--pixels` as YAML has it: a text, a number, several, or none."""
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
