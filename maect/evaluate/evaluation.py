"""Run one protocol on one run and write its JSON: metrics, every setting, provenance."""

import platform
import shutil
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maect import __version__
from maect.core.context import Context
from maect.core.errors import MissingFileError, UserError, explain_out_of_memory
from maect.core.files import sha256_file
from maect.core.settings import digest
from maect.data.config import index_digest, shards_of_features
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig
from maect.evaluate.base import (
    EvaluationJob,
    Features,
    Interrupted,
    OutputOf,
    Protocol,
    RealLabels,
    Shards,
    Trained,
    encoder_checksum,
)
from maect.evaluate.real import real_sha256
from maect.evaluate.store import open_record
from maect.records import EvaluationRecord, RunRecord, checked_sha256

PACKAGES = ("numpy", "scipy", "scikit-learn", "umap-learn", "torch", "timm")


def evaluate(context: Context, *, config: str | Path, digest: str | None = None) -> str:
    """Evaluate by `evaluations/RUN/NAME.yaml` and write the JSON next to it, on every rank.

    `digest` is that of the file when the job was submitted.

    Returns:
        "done", or "requeue" if the job was asked to stop and has saved its state.

    Raises:
        UserError: a file, setting or input that the protocol cannot use.
    """
    resolved = EvaluationConfig.read(config, submitted=digest)
    with explain_out_of_memory():
        return run(context, job_of(resolved, Path(config)), resolved.settings)


def job_of(resolved: EvaluationConfig, config: Path) -> EvaluationJob:
    """Return the job of a resolved file; its result goes beside the file."""
    return EvaluationJob(
        resolved.run, config.with_suffix(".json"), resolved.inputs, resolved.resize
    )


def run(context: Context, job: EvaluationJob, protocol: Protocol) -> str:
    """Evaluate and write `job.out`, atomically; called on every rank, and returns as `evaluate`."""
    # Protocols on stored features use the cores of rank 0's node, through threads.
    if context.rank and not protocol.every_rank:
        return "done"
    job = replace(job, is_current=context.is_current)
    # Before anything is computed, or a file beside the JSON replaced.
    encoder = evaluated_encoder(job, protocol) if context.rank == 0 else None
    try:
        metrics = protocol.evaluate(context, job)
    except Interrupted:
        return "requeue"
    if context.rank == 0:
        job.check_current()
        tensors = job.out.with_suffix(".safetensors")
        EvaluationRecord(
            metrics=metrics,
            settings=protocol.model_dump(mode="json") | {"resize": job.resize},
            provenance=provenance(job, protocol, context.world_size, encoder)
            | {"test_data": protocol.test_data}
            | job.notes,
            left_sha256=sha256_file(tensors) if protocol.writes_tensors else None,
            outcomes=job.outcomes or None,
        ).write(job.out)
        shutil.rmtree(job.state, ignore_errors=True)
    return "done"


class Completion:
    """The result that a resolved file asks for: of this encoder, settings and inputs."""

    def __init__(self, config: str | Path) -> None:
        """Read weights and inputs, once; a UserError if one cannot be read or is damaged."""
        resolved = EvaluationConfig.read(config)
        job = job_of(resolved, Path(config))
        self._out = job.out
        self._resolved = resolved
        self._encoder = encoder_checksum(job.run)
        self._sources = _sources(job, resolved.settings)
        self.identity = digest(resolved.digest, self._encoder, self._sources)

    def is_there(self) -> bool:
        """Return whether it is; cheap to ask again."""
        try:
            result = EvaluationRecord.read(self._out)
        except MissingFileError:
            return False
        about = result.provenance
        left = self._out.with_suffix(".safetensors")
        if result.left_sha256 and not (left.exists() and sha256_file(left) == result.left_sha256):
            return False  # of a job that was stopped between the two
        return (
            self._resolved.is_answered_by(result)
            and about["encoder_sha256"] == self._encoder
            and about["splits"] == self._sources["splits"]
            and about.get("inputs", {}) == self._sources["inputs"]
        )


def evaluated_encoder(job: EvaluationJob, protocol: Protocol) -> str | None:
    """Return the sha256 of the evaluated encoder; without its file, that of the features.

    Raises:
        UserError: a damaged encoder or tensors of another evaluation, or features that were not
            made from the encoder, or are of other images.
    """
    encoder = job.run / "encoder.safetensors"
    promised = RunRecord.find(job.run)
    actual = promised.encoder_sha256 if promised else None
    if encoder.exists():
        actual = encoder_checksum(job.run)
    declared = protocol.inputs().items()
    for name, kind in declared:
        if isinstance(kind, OutputOf) and name in job.inputs and job.path(name).exists():
            checked_sha256(job.path(name))
    # A file that is missing, or two that do not belong together, the protocol itself refuses.
    made: dict[Path, str] = {
        job.path(name): _features_record(job.path(name), kind)["encoder_sha256"]
        for name, kind in declared
        if isinstance(kind, Features) and name in job.inputs and job.path(name).exists()
    }
    for path, sha256 in made.items():
        if actual not in (None, sha256):
            raise UserError(f"{path}: made from another encoder than {encoder}; extract it again")
    return actual or next(iter(made.values()), None)


def _features_record(path: Path, kind: Features) -> dict[str, Any]:
    """Read a features file's header; raise UserError if it does not match its path."""
    made = open_record(path)
    shards = shards_of_features(path, kind.split)
    split = made.get("split", kind.split)
    digest = index_digest(shards) if shards else None
    if split != kind.split and f"-{kind.split}." in f"{path.stem}.":
        raise UserError(f"{path}: made of the split {split}; delete it: it is extracted again")
    if made.get("norm", kind.norm) != kind.norm:
        how = "without" if kind.norm else "with"
        raise UserError(f"{path}: made {how} the encoder's final norm; extract it again")
    blocks = made.get("blocks", kind.blocks)
    if blocks != kind.blocks:
        raise UserError(f"{path}: made of {blocks} blocks, not {kind.blocks}; extract it again")
    if digest not in (None, made["index_digest"]):
        raise UserError(f"{path}: made of other images than {shards}; delete it: it is made again")
    return made


def provenance(
    job: EvaluationJob, protocol: Protocol, world_size: int, encoder_sha256: str | None
) -> dict[str, Any]:
    """Return where a result comes from: run, encoder, data and versions."""
    versions = {"maect": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "protocol": protocol.name,
        "run": job.run.name,
        "encoder_sha256": encoder_sha256,
        **_sources(job, protocol),
        "world_size": world_size,
        "versions": versions,
    }


def _sources(job: EvaluationJob, protocol: Protocol) -> dict[str, dict[str, Any]]:
    """Return `splits`, with headers of their features or digests, and `inputs`, with checksums."""
    splits: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    keep = ("index_digest", "pooling", "image_size", "resize", "precision", "device", "sha256")
    declared = protocol.inputs()
    encoded = {kind.split for kind in declared.values() if isinstance(kind, Features)}
    for name, kind in declared.items():
        if isinstance(kind, Features):
            made = _features_record(job.path(name), kind)
            splits[name] = {key: made[key] for key in keep if key in made}
        elif isinstance(kind, Shards) and kind.split not in encoded:
            splits[name] = {"index_digest": open_index(job.path(name)).digest}
        elif isinstance(kind, OutputOf):
            inputs[name] = checked_sha256(job.path(name))
        elif isinstance(kind, Trained):
            inputs[name] = [encoder_checksum(run) for run in job.paths(name)]
    if isinstance(protocol, RealLabels) and protocol.real_labels is not None:
        inputs["real_labels"] = real_sha256(protocol)
    return {"splits": splits, "inputs": inputs}
