"""Declaration of a protocol (settings, inputs, outputs, cost), and its job; torch-free.

A protocol is its settings class, in a module of this package. Rules, plan and checks read the
declaration, so its module imports nothing heavy at the top; `work` names the function that
computes, in any module of this package.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import SupersededError, UserError
from maect.core.files import atomic_write, seek_record, write_record
from maect.core.settings import ContentPath, Settings
from maect.recipes import KNN_K, KNN_TEMPERATURE, Encoder
from maect.recipes.cost import encode_flops
from maect.records import Outcome, checked_sha256, need_encoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.store import FeatureFile
    from maect.stages import Stage

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

ImageCount = Callable[[str], int]
"""Number of images of a split of the evaluated dataset."""


@dataclass(frozen=True)
class Features:
    """The features file of a split, made with the run's encoder, with its final norm or without.

    Attributes:
        blocks: the raw output of this many last blocks side by side, which is before the norm.
    """

    split: str
    norm: bool = True
    blocks: int = 1


@dataclass(frozen=True)
class Shards:
    """The folder of a split's shards."""

    split: str


@dataclass(frozen=True)
class OutputOf:
    """The tensors that another evaluation of the same run writes beside its JSON."""

    evaluation: str


@dataclass(frozen=True)
class Trained:
    """The folders of runs that are trained for this evaluation, by their suffixes."""

    runs: tuple[str, ...]


Input = Features | Shards | OutputOf | Trained


class Interrupted(Exception):
    """The job was asked to stop and has saved what it needs to resume."""


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation of a run, with the inputs that its protocol declares.

    Attributes:
        out: the JSON that will be written; other files go beside it under its stem.
        resize: shorter side before the centre crop of an image; none: 256/224 of the crop.
    """

    run: Path
    out: Path
    inputs: Mapping[str, Path | list[Path]] = field(default_factory=dict)
    resize: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """Entries that a protocol adds to the provenance."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Correctness of each test image, by metric; kept in the result."""
    is_current: Callable[[], bool] = field(default=lambda: True, compare=False)
    """Whether no other job has taken the evaluation over."""

    @property
    def encoder(self) -> Path:
        """Return where the evaluated encoder is."""
        return self.run / "encoder.safetensors"

    def check_current(self) -> None:
        """Raise a SupersededError before a file of another job is replaced."""
        if not self.is_current():
            raise SupersededError(f"{self.out}: another job has taken this evaluation over")

    @property
    def state(self) -> Path:
        """Return the folder that a killed job resumes from; it is removed with the job's end."""
        return self.out.with_name(f".{self.out.stem}.state")

    def compute_once(self, context: Context, identity: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON of a long computation, from disk if a killed job has finished it.

        `identity` is a digest of everything that the result depends on.
        """
        file = self.state / "once.json"
        known = seek_record(file)
        if known.get("identity") != identity:
            known = {"identity": identity, "found": compute()}
            write_record(file, known)
            context.saved(1)  # the only step: progress that a restarted job keeps
        return known["found"]

    def path(self, name: str) -> Path:
        """Return where the input called `name` is, or raise a UserError: it was not given."""
        (path,) = self.paths(name)
        return path

    def paths(self, name: str) -> list[Path]:
        """Return where the parts of the input called `name` are, such as several trained runs."""
        if name not in self.inputs:
            raise UserError(f"{self.out.stem}: lacks the input {name!r}")
        value = self.inputs[name]
        return value if isinstance(value, list) else [value]

    def features(self, name: str, *, labelled: bool = True) -> "FeatureFile":
        """Open the features file called `name` ("train" or "test") and check it."""
        from maect.evaluate.store import check_labelled, open_features

        features = open_features(self.path(name))
        if labelled:
            check_labelled(features)
        return features

    def write_tensors(self, tensors: "Mapping[str, NDArray[Any]]", about: Any = None) -> None:
        """Write tensors beside the JSON, and `about` in the file's metadata."""
        import numpy as np
        from safetensors.numpy import save_file

        plain = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        self.check_current()
        with atomic_write(self.out.with_suffix(".safetensors")) as temporary:
            save_file(plain, temporary, None if about is None else {"maect": json.dumps(about)})

    def keep_outcomes(self, right: "Mapping[str, NDArray[np.bool_]]") -> dict[str, float]:
        """Keep the outcomes of test images; return the ends of their intervals as metrics.

        Args:
            right: by metric, whether each image was right, bool [n] or, of several trials on each,
                [trials, n].
        """
        import numpy as np

        from maect.evaluate.outcomes import interval_metrics, pack

        self.outcomes.update({name: pack(trials) for name, trials in right.items()})
        return interval_metrics(
            {name: np.atleast_2d(one).mean(axis=0) for name, one in right.items()}
        )

    def train_and_test(self) -> tuple["FeatureFile", "FeatureFile"]:
        """Open train and test features of one encoder and check them."""
        from maect.evaluate.store import check_same_encoder

        train, test = self.features("train"), self.features("test")
        check_same_encoder(train, test)
        return train, test


class Protocol(Settings):
    """Base of all protocols: the settings are fields, the rest is declared."""

    name: ClassVar[str]
    """Name of the protocol and of its rule."""
    title: ClassVar[str]
    """Title for messages."""
    work: ClassVar[str] = ""
    """`MODULE.FUNCTION` of this package that computes the metrics from the settings, the context
    and the job; unless the class overrides `evaluate`."""
    writes_tensors: ClassVar[bool] = False
    """Whether a safetensors file is written next to the JSON."""
    every_rank: ClassVar[bool] = False
    """Whether all ranks take part; otherwise rank 0 uses the cores of its node."""
    labelled: ClassVar[bool] = True
    """Whether it needs images with labels."""
    encoder_input: ClassVar[bool] = False
    """Whether `encoder.safetensors` itself is read."""
    by_size: ClassVar[bool] = False
    """Whether its setting `size` is the encoder's size, unless it is set."""
    minutes: ClassVar[float] = 10.0
    """Assumed for a plan where `flops` is not known: of 50,000 test images."""
    least_seconds: ClassVar[float] = 10.0
    """Least seconds assumed for a plan, for any number of images."""
    test_data: ClassVar[str | None] = None
    """Uses of the test split besides scoring; goes into the result."""

    headlines: ClassVar[Mapping[str, str] | None] = None
    """Value of `headline`; None: the protocol's own name, and that of the held-out choice."""

    train_split: str = "train"
    test_split: str = "val"

    @abstractmethod
    def inputs(self) -> Mapping[str, Input]:
        """Return the inputs of `evaluate` besides the encoder, by name."""

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Compute the metrics; called on every rank if `every_rank`, otherwise on rank 0.

        Raises:
            Interrupted: asked to stop; the state is saved.
            UserError: an input that cannot be evaluated.
        """
        module, function = self.work.split(".")
        compute = getattr(import_module(f"maect.evaluate.{module}"), function)
        metrics: dict[str, Any] = compute(self, context, job)
        return metrics

    def headline(self) -> Mapping[str, str]:
        """Return the metrics that sum up a result, with their titles."""
        if self.headlines is not None:
            return self.headlines
        held_out = f"{self.title}, chosen on held-out training images"
        return {self.name: self.title, f"{self.name}_held_out": held_out}

    def trainings(self) -> "Mapping[str, tuple[Stage, int]]":
        """Return settings and seed of the runs to train for this evaluation, by name ending."""
        return {}

    def check_ranks(self, ranks: int) -> None:
        """Refuse, by a UserError, a number of processes that cannot share the work."""

    def flops(self, encoder: Encoder, images: ImageCount) -> float | None:
        """Count the operations on the devices; None if it runs no encoder."""
        count = self.encoded(images)
        return None if count is None else encode_flops(encoder) * count

    def encoded(self, images: ImageCount) -> float | None:
        """Count the images that are encoded; None if it runs no encoder."""
        return None

    @property
    def full_precision(self) -> bool:
        """Return whether those operations are in float32."""
        return bool(getattr(self, "precision", "fp32") == "fp32")

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits of the evaluated dataset that are read."""
        given = self.inputs().values()
        return tuple(dict.fromkeys(i.split for i in given if isinstance(i, Features | Shards)))

    @property
    def needs(self) -> tuple[str, ...]:
        """Evaluations of the same run whose files are read."""
        return tuple(i.evaluation for i in self.inputs().values() if isinstance(i, OutputOf))


def check_blocks(given: Any) -> Any:
    """Refuse, by a ValueError, outputs of several blocks behind the encoder's final norm."""
    if given.blocks > 1 and given.norm:
        raise ValueError(f"blocks {given.blocks} are read before the final norm: set norm: false")
    return given


class ReadsFeatures(Protocol):
    """Base of the protocols on stored features."""

    norm: bool = True
    """Whether the encoder's final norm is applied. Many public k-NN numbers are without it."""
    blocks: int = Field(default=1, gt=0)
    """Number of last blocks whose outputs are read side by side; above 1 before the norm."""

    _raw = model_validator(mode="after")(check_blocks)

    reads: ClassVar[tuple[str, ...]] = ("train", "test")
    """The splits whose features it reads."""

    def inputs(self) -> Mapping[str, Input]:
        """Features of these splits."""
        return {name: self.read(getattr(self, f"{name}_split")) for name in self.reads}

    def read(self, split: str) -> Features:
        """Return the features of a split that these settings ask for."""
        return Features(split, self.norm, self.blocks)


class RealLabels(Settings):
    """Settings of protocols that can also score by ImageNet-ReaL's labels."""

    real_labels: ContentPath | None = None
    """ReaL's `real.json`: a list of classes for each of ImageNet's 50,000 validation images."""

    @property
    def labels_file(self) -> Path | None:
        """Return where the labels are; None if they are not asked for."""
        if self.real_labels is None:
            return None
        return Path(os.path.expandvars(self.real_labels)).expanduser()


class KnnVote(Settings):
    """Neighbours and temperature of weighted k-NN."""

    k: int = Field(default=KNN_K, gt=0)
    """Number of neighbours that vote."""
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    """T: a neighbour of cosine similarity s has the weight exp(s / T)."""


class Encodes(Protocol):
    """Base of the protocols that run the encoder on images, on every rank."""

    every_rank: ClassVar[bool] = True
    encoder_input: ClassVar[bool] = True

    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of the frozen encoder; what is trained on it is float32."""

    def inputs(self) -> Mapping[str, Input]:
        """Images of both splits."""
        return {"train": Shards(self.train_split), "test": Shards(self.test_split)}


def encoder_checksum(run: Path) -> str:
    """Return the sha256 of a run's `encoder.safetensors`; raise UserError if its record differs."""
    encoder = run / "encoder.safetensors"
    need_encoder(encoder)
    return checked_sha256(encoder)


def encoder_settings(run: Path) -> Encoder:
    """Return the shape of a run's encoder from its file; raise UserError if it is none."""
    from safetensors import SafetensorError, safe_open

    path = run / "encoder.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            return Encoder.model_validate_json((file.metadata() or {})["encoder"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not an encoder ({error})") from None


def idle_cpus(context: Context) -> int:
    """Return the cores of all ranks on this node, for a protocol that runs on rank 0 alone."""
    return max(1, context.cpus * context.local_world_size)
