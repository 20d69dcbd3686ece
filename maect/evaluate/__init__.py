"""Evaluations of an encoder: the protocols by name, and the resolved files of evaluations.

An evaluation is a protocol, or a variant of one with settings of its own; its resolved file is
`evaluations/RUN/NAME.yaml`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from maect.core.errors import UserError, did_you_mean
from maect.core.settings import LocalPath, digest, validated
from maect.core.stamps import Checksums, StampedFile, known_record, record_checksum, size_and_time
from maect.evaluate.base import Features, Protocol, RealLabels, Shards, Trained, check_blocks
from maect.evaluate.protocols.encoders import (
    Accuracy,
    Agreement,
    EffectiveInvariance,
    KnnPerBlock,
    Robustness,
    Throughput,
)
from maect.evaluate.protocols.probes import (
    AttentiveProbe,
    ColorHistogram,
    EfficientProbe,
    LarsLinearProbe,
    LinearProbe,
    PatchKnn,
    PatchLinear,
    PatchLogistic,
)
from maect.evaluate.protocols.stored_features import (
    Clustering,
    Explore,
    Geometry,
    Knn,
    Logistic,
    LowShot,
    Retrieval,
    Umap,
)
from maect.recipes import variant_names, variant_values
from maect.records import ENCODER, EvaluationRecord, RunRecord, weights_checksum

PROTOCOLS: dict[str, type[Protocol]] = {
    one.name: one
    for one in (
        Knn,
        LowShot,
        Logistic,
        LinearProbe,
        EfficientProbe,
        LarsLinearProbe,
        AttentiveProbe,
        PatchKnn,
        PatchLogistic,
        PatchLinear,
        Accuracy,
        ColorHistogram,
        KnnPerBlock,
        Clustering,
        Geometry,
        Retrieval,
        Robustness,
        EffectiveInvariance,
        Throughput,
        Umap,
        Explore,
        Agreement,
    )
}
"""Protocols by name."""


def evaluation_names() -> tuple[str, ...]:
    """Names of all evaluations: every protocol, and the variants of `evaluations.yaml`."""
    return tuple(dict.fromkeys([*PROTOCOLS, *variant_names()]))


def load_evaluation(
    name: str, size: str, overrides: Mapping[str, Any] | None = None
) -> tuple[str, Protocol]:
    """Return an evaluation's protocol and its settings for an encoder size.

    Args:
        name: a protocol or one of its variants; with the key `protocol` in `overrides`, any name.

    Returns:
        The name of the protocol, and the settings.

    Raises:
        UserError: unknown evaluation, protocol or key, or a value out of range.
    """
    values = variant_values(name, size) | dict(overrides or {})
    protocol = values.pop("protocol", name)
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, evaluation_names())
        raise UserError(f"unknown protocol {protocol!r}; {hint}")
    if PROTOCOLS[protocol].by_size:
        values.setdefault("size", size)
    return protocol, validated(PROTOCOLS[protocol], values, name)


class FeaturesConfig(StampedFile):
    """Features of a split. They go beside the file, as `.safetensors`."""

    run: LocalPath
    """Folder of the run whose encoder makes them."""
    shards: LocalPath
    """Folder of the split."""
    precision: Literal["fp32", "tf32", "bf16"]
    """Precision of the encoder's products."""
    resize: int = Field(gt=0)
    """Shorter side of images before the centre crop."""
    norm: bool = True
    """Whether the encoder's final norm is applied."""
    blocks: int = Field(default=1, gt=0)
    """The raw output of this many last blocks, side by side."""

    _raw = model_validator(mode="after")(check_blocks)

    @property
    def how(self) -> dict[str, Any]:
        """Everything but the encoder and the images, as the header of the features says it."""
        return self.model_dump(exclude={"run", "shards"})

    def made_of(self) -> Checksums:
        """Return the checksums of the encoder and of the images."""
        return {
            RunRecord.path(self.run): _encoder_sha256(self.run),
            self.shards / "index.json": known_record(self.shards / "index.json").get("digest"),
        }

    def result(self, path: Path) -> str | None:
        """Return the identity of the features beside the file at `path`."""
        return features_identity(path.with_suffix(".safetensors"))

    @property
    def identity_to_be(self) -> str | None:
        """Return the identity that the features have if they are made now, as far as known."""
        encoder, index = self.made_of().values()
        if encoder is None or index is None:
            return None
        return _identity(self.how | {"encoder_sha256": encoder, "index_digest": index})


class EvaluationConfig(StampedFile):
    """One evaluation. `NAME.json` and the other outputs of the protocol lie beside the file."""

    evaluation: str
    protocol: str
    run: LocalPath
    """Folder of the run that is evaluated."""
    resize: int | None = Field(default=None, gt=0)
    """Shorter side before the centre crop of test images; none: 256/224 of their size."""
    inputs: dict[str, LocalPath | list[LocalPath]] = Field(default_factory=dict)
    """Inputs by the protocol's names: features, outputs of other evaluations, folders of shards or
    of runs."""
    settings: SerializeAsAny[Protocol]

    kinds = ("protocol", PROTOCOLS)

    def named(self, path: Path) -> Self:
        """Return the same evaluation under another name."""
        return self.model_copy(update={"evaluation": path.stem})

    def is_answered_by(self, result: EvaluationRecord) -> bool:
        """Return whether a result has these settings."""
        settings = dict(result.settings)
        return settings.pop("resize", None) == self.resize and self.settings.matches_record(
            settings
        )

    @property
    def digest(self) -> str:
        """Identity of the evaluation's settings; where its inputs are is not part of it."""
        return digest(self.protocol, self.settings, self.resize)

    def made_of(self) -> Checksums:
        """Return the checksums of the encoder and of all that the protocol reads."""
        found = {RunRecord.path(self.run): _encoder_sha256(self.run)}
        for name, kind in self.settings.inputs().items():
            if name not in self.inputs:
                continue
            for path in self.paths(name):
                if isinstance(kind, Features):
                    found[path] = features_identity(path)
                elif isinstance(kind, Shards):
                    found[path / "index.json"] = known_record(path / "index.json").get("digest")
                elif isinstance(kind, Trained):
                    found[RunRecord.path(path)] = weights_checksum(path)
                else:
                    left = known_record(path.with_suffix(".json"))
                    found[path] = left.get("left_sha256")
        labels = self.settings.labels_file if isinstance(self.settings, RealLabels) else None
        if labels is not None:
            found[labels] = size_and_time(labels)
        return found

    def result(self, path: Path) -> str | None:
        """Return the checksum of the result, if the tensors that it names are there."""
        record = path.with_suffix(".json")
        left = known_record(record).get("left_sha256")
        if left is not None and not path.with_suffix(".safetensors").exists():
            return None
        return record_checksum(record)

    def path(self, name: str) -> Path:
        """Return an input that is one path."""
        (path,) = self.paths(name)
        return path

    def paths(self, name: str) -> list[Path]:
        """Return an input as a list, even if it is one path."""
        value = self.inputs[name]
        return value if isinstance(value, list) else [value]


def features_identity(path: Path) -> str | None:
    """Return the identity of a features file, by its header; None if there is no such file."""
    try:
        status = path.stat()
        return _read_identity(path, status.st_mtime_ns, status.st_size)
    except (OSError, UserError):
        return None


@cache
def _read_identity(path: Path, changed: int, size: int) -> str:
    from maect.evaluate.store import open_record  # it imports NumPy

    return _identity(open_record(path))


def _identity(record: Mapping[str, Any]) -> str:
    """Return the identity of features by the header fields that decide them."""
    said = {"norm": True, "blocks": 1, **record}
    names = ("encoder_sha256", "index_digest", "precision", "resize", "norm", "blocks")
    return digest({name: said.get(name) for name in names})


def _encoder_sha256(run: Path) -> str | None:
    return known_record(RunRecord.path(run)).get("sha256", {}).get(ENCODER)
