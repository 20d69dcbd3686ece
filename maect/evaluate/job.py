"""What every protocol is given: where its inputs are and where it may leave files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import checked_sha256

if TYPE_CHECKING:
    from maect.evaluate.store import FeatureFile


class Interrupted(Exception):
    """The job was told to stop and has saved what it needs to go on."""


@dataclass(frozen=True)
class Job:
    """An evaluation of a run, with the inputs that its protocol declares.

    Attributes:
        run: folder of the run; its `encoder.safetensors` is evaluated.
        out: the JSON that will be written; other files go beside it under its stem.
        inputs: features files, folders of shards, or what other evaluations left, by name.
        resize: shorter side before the centre crop of test images; none: 256/224 of their size.
    """

    run: Path
    out: Path
    inputs: Mapping[str, Path | list[Path]] = field(default_factory=dict)
    resize: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What a protocol adds to the provenance."""

    @property
    def state(self) -> Path:
        """Folder of what a killed job goes on from; removed when the JSON is written."""
        return self.out.with_name(f".{self.out.stem}.state")

    def path(self, name: str) -> Path:
        """Where the input called `name` is.

        Raises:
            UserError: it was not given.
        """
        (path,) = self.paths(name)
        return path

    def paths(self, name: str) -> list[Path]:
        """Where the parts of the input called `name` are, such as several trained runs.

        Raises:
            UserError: it was not given.
        """
        if name not in self.inputs:
            raise UserError(f"{self.out.stem}: lacks the input {name!r}")
        value = self.inputs[name]
        return value if isinstance(value, list) else [value]

    def features(self, name: str, *, labelled: bool = True) -> "FeatureFile":
        """The features file called `name` ("train" or "test"), checked."""
        from maect.evaluate.store import check, open_features

        features = open_features(self.path(name))
        check(features, labelled=labelled)
        return features

    def both(self) -> tuple["FeatureFile", "FeatureFile"]:
        """Train and test features of one encoder, checked."""
        from maect.evaluate.store import same_encoder

        train, test = self.features("train"), self.features("test")
        same_encoder(train, test)
        return train, test


def encoder_checksum(run: Path) -> str:
    """sha256 of a run's `encoder.safetensors`.

    Raises:
        UserError: it is missing, or not the one that the run's completion record promises.
    """
    encoder = run / "encoder.safetensors"
    if not encoder.exists():
        raise UserError(f"{encoder}: no such encoder; train or import the run first")
    return checked_sha256(encoder)


def idle_cpus(context: Context) -> int:
    """Cores for a protocol that runs on rank 0 alone: those of all ranks on its node."""
    return max(1, context.cpus * context.local_world_size)
