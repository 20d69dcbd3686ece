"""What every protocol is given: where its inputs are and where it may leave files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from maect.core.errors import UserError
from maect.evaluate.store import Features, check, open_features, same_encoder


class Context(Interface):
    """One rank's place in a job, as `maect.launch` hands it out."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    cpus: int

    def stop_requested(self) -> bool:
        """Whether this rank was told to save and return."""

    def report(self, progress: dict, /) -> None:
        """Tell the launcher how far the job is."""


class Interrupted(Exception):
    """The job was told to stop and has saved what it needs to go on."""


@dataclass(frozen=True)
class Job:
    """Inputs of an evaluation; a protocol asks for those it needs.

    Attributes:
        run: folder of the run; its `encoder.safetensors` is evaluated.
        out: the JSON that will be written; other files go beside it under its stem.
        train, test: features files.
        train_shards, test_shards: folders of shards.
        splits: folders of shards of further splits, by name.
        probe: classifier of a linear probe, `linear_probe.safetensors`.
        clusters: `clustering.safetensors`.
        resize: shorter side before the centre crop of test images; none: 256/224 of their size.
    """

    run: Path
    out: Path
    train: Path | None = None
    test: Path | None = None
    train_shards: Path | None = None
    test_shards: Path | None = None
    splits: Mapping[str, Path] = field(default_factory=dict)
    probe: Path | None = None
    clusters: Path | None = None
    resize: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What a protocol adds to the provenance."""

    @property
    def state(self) -> Path:
        """Folder of what a killed job goes on from; removed when the JSON is written."""
        return self.out.with_name(f".{self.out.stem}.state")

    def need(self, name: str) -> Path:
        """The input called `name`.

        Raises:
            UserError: it was not given.
        """
        value: Path | None = getattr(self, name)
        if value is None:
            option = name.replace("_", "-") + ("-features" if name in ("train", "test") else "")
            raise UserError(f"{self.out.stem}: needs --{option}")
        return value

    def features(self, name: str, *, labelled: bool = True) -> Features:
        """The features file called `name` ("train" or "test"), checked."""
        features = open_features(self.need(name))
        check(features, labelled=labelled)
        return features

    def both(self) -> tuple[Features, Features]:
        """Train and test features of one encoder, checked."""
        train, test = self.features("train"), self.features("test")
        same_encoder(train, test)
        return train, test


def idle_cpus(context: Context) -> int:
    """Cores for a protocol that runs on rank 0 alone: those of all ranks on its node."""
    return max(1, context.cpus * context.local_world_size)
