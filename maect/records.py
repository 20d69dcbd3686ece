"""Completion records of runs and evaluations, and the log of a run, `metrics.jsonl`."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from maect.core.errors import UserError
from maect.core.files import RUN, open_file, read_record, seek_record, sha256_file, write_record
from maect.core.settings import Settings, digest, one_line
from maect.core.stamps import known_record
from maect.recipes import Encoder
from maect.recipes.settings import Computing

ENCODER = "encoder.safetensors"
SUFFIX = re.compile(r"-s(\d+)$")
"""Suffix of the names of runs that differ only in their seed: RUN, RUN-s1, RUN-s2 ..."""
LOGGED_EVERY_STEP = 10_000
"""Runs longer than this many steps log every 50th."""


class Sourced(Protocol):
    """A run, as declared or as recorded."""

    @property
    def source(self) -> str | None:
        """Return the name of the run that it starts from."""


T = TypeVar("T", bound=Sourced)


class Record(Settings):
    """A JSON file with a format and its own checksum; fields that are None are left out."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            UserError: it is missing, damaged, incomplete or of another format.
        """
        try:
            return cls.model_validate(read_record(path))
        except ValidationError as error:
            fault = one_line(error, cls, str(path))
            raise UserError(f"{fault}; remove the file, and start what writes it again") from None

    @classmethod
    def seek(cls, path: Path) -> Self | None:
        """Read a file that others may be writing or removing; none: not there, or damaged."""
        try:
            return cls.model_validate(seek_record(path))
        except ValidationError:
            return None

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        values = self.model_dump(mode="json")
        write_record(path, {key: value for key, value in values.items() if value is not None})


class ImportedFile(Settings):
    """The checkpoint that an import was made from."""

    model_config = ConfigDict(extra="ignore")  # records of 0.2.0 have more

    file: str
    sha256: str
    size: int
    modified: int
    """Time of the file's last change, in nanoseconds."""
    layout: str | None
    left_out: dict[str, int]
    """Number of tensors by pattern."""
    timm: str | None = None
    layer_scale_folded: bool = False
    """Whether its LayerScale is in the matrices before it (`fold_layer_scale`)."""


class EpochScores(Settings):
    """Accuracy after each epoch, in percent."""

    index_digest: str
    resize: int | None
    accuracies: tuple[float, ...]


class Subset(Settings):
    """The images of a split that had labels."""

    images: int
    sha256: str
    """SHA-256 of their names."""


class RunRecord(Record):
    """Completion record of a run: written last, once all that it names is there."""

    run: str
    stage: str
    fingerprint: str = ""
    """Identity of the result: of settings, shape, seed, data and what it starts from."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the stage; `maect.stages.recorded` reads them."""
    computing: Computing | None = None
    """Way in which its last job trained it; None: an import."""
    seed: int | None = None
    encoder: Encoder | None = None
    size: str | None = None
    source: str | None = None
    """Name of the run that it started from."""
    index_digest: str | None = None
    """Digest of the split that it was trained on; None: an import, or not noted."""
    view_of: str | None = None
    """Digest of the split that this one is a view of: their samples have the same ids."""
    weights: ImportedFile | None = None
    pooling: str | None = None
    subset: Subset | None = None
    files: tuple[str, ...] = ()
    sha256: dict[str, str] = Field(default_factory=dict)
    world_size: int | None = None
    device_hours: float | None = None
    held_hours: float | None = None
    useful_part: float | None = None
    images_per_second: float | None = None
    finished: str | None = None
    """When, in UTC."""
    versions: dict[str, str] = Field(default_factory=dict)
    source_revision: str | None = None
    attempts: tuple[dict[str, Any], ...] = ()
    losses: tuple[float, ...] | None = None
    """Means of the epochs."""
    scores: EpochScores | None = None
    log_sha256: str | None = None
    """Checksum of its log; None: an import, or trained by an earlier version."""

    @classmethod
    def path(cls, folder: Path) -> Path:
        """Return where the record of the run in a folder is."""
        return folder / RUN

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the record of the run in a folder.

        Raises:
            UserError: the run is not finished, or its record is damaged or of another format.
        """
        return cls.read(cls.path(folder))

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the record of the run in a folder; none: there is none, or it is damaged."""
        return cls.seek(cls.path(folder))

    @property
    def encoder_sha256(self) -> str | None:
        """Return the checksum of the encoder that it left."""
        return self.sha256.get(ENCODER)

    @property
    def epochs(self) -> float | None:
        """Return for how many it was trained; none: it was not."""
        return self.settings.get("epochs")


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has a completion record."""
    return RunRecord.path(folder).exists()


def lineage(name: str | None, find: Callable[[str], T | None]) -> Iterator[T]:
    """Yield a run that `find` finds by its name, its source, and so on, each once."""
    seen: set[str] = set()
    while name is not None and name not in seen and (run := find(name)) is not None:
        yield run
        seen.add(name)
        name = run.source


def of_seed(name: str, seed: int) -> str:
    """Return the name of a run of this seed."""
    return f"{name}-s{seed}" if seed else name


def seedless(run: str) -> str:
    """Return the name of a run without its seed."""
    return SUFFIX.sub("", run)


def seed_of(run: str) -> int:
    """Return the seed in the name of a run."""
    match = SUFFIX.search(run)
    return int(match[1]) if match else 0


class Outcome(Settings):
    """Answers for single test images; `maect.evaluate.outcomes` writes and reads them."""

    images: int
    trials: int
    """Trials on each image, such as label sets or runs of k-means; 1: a single answer."""
    right: str
    """Number of trials in which each image was right, in the order of the split: unsigned 16-bit
    numbers, little-endian, compressed (zlib) and in base64."""


class EvaluationRecord(Record):
    """Result of an evaluation."""

    metrics: dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)
    left_sha256: str | None = None
    """SHA-256 of the tensors next to it."""
    outcomes: dict[str, Outcome] | None = None
    """Outcomes of single test images, by metric; empty: the protocol or its version has none."""

    @property
    def encoder_sha256(self) -> str | None:
        """Return the checksum of the encoder that was evaluated."""
        return self.provenance.get("encoder_sha256")


def weights_checksum(run: Path) -> str | None:
    """Return the identity of the weights that a finished run promises; None if it is not known."""
    sha256 = known_record(RunRecord.path(run)).get("sha256")
    return digest(sha256) if sha256 else None


def need_encoder(path: Path) -> None:
    """Refuse an encoder's file that is not there (UserError)."""
    if not path.exists():
        raise UserError(f"{path}: no such encoder; train or import the run first")


def checked_sha256(path: Path) -> str:
    """sha256 of a file that a run or an evaluation left.

    Raises:
        UserError: it is missing, or not the one that the record beside it promises.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; its run is not finished")
    actual = sha256_file(path)
    promised = None
    if is_finished(path.parent):
        record = RunRecord.path(path.parent)
        promised = RunRecord.read(record).sha256.get(path.name)
    elif (record := path.with_suffix(".json")).exists():
        promised = EvaluationRecord.read(record).left_sha256
    if promised not in (None, actual):
        raise UserError(
            f"{path}: damaged (its checksum is not that in {record.name}); delete it and start "
            "again"
        )
    return actual


def log_interval(steps: int) -> int:
    """Return how many steps lie between two entries."""
    return 1 if steps <= LOGGED_EVERY_STEP else 50


def line_of(step: int, values: dict[str, float], timing: dict[str, float]) -> str:
    """Return the line of a step."""
    return json.dumps({"step": step, **values, "timing": timing}) + "\n"


def entries(path: Path, tail: int | None = None, sha256: str | None = None) -> list[dict[str, Any]]:
    """Return the entries of a log, oldest first; [] without a file.

    Lines that are no entries are left out: a training that is killed, or at work, may not have
    written all of the last one.

    Args:
        tail: read only this many bytes at its end.
        sha256: of the log of a finished run, as its record has it.

    Raises:
        UserError: the log is not that of the record.
    """
    try:
        if sha256 is not None and sha256_file(path) != sha256:
            raise UserError(
                f"{path}: damaged (its checksum is not that in {RUN}); put it back from a copy, or "
                "delete it: what reads the log goes on without it"
            )
        with open_file(path) as file:
            start = max(0, path.stat().st_size - tail) if tail is not None else 0
            file.seek(start)
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    if start:
        del lines[0]  # the end of a line
    found = [_entry_of(line) for line in lines]
    return [entry for entry in found if entry is not None]


def _entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line; None if it has none."""
    try:
        entry: dict[str, Any] = json.loads(line)
        timing = entry["timing"]
        timing.pop("crc32", None)  # of logs of earlier versions
        is_entry = type(entry["step"]) is int and isinstance(timing["device_seconds"], float | int)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if is_entry else None
