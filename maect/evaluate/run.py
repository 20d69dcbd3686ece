"""Run one protocol on one run and write its JSON: metrics, every setting, provenance."""

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maect import __version__
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import read_json, sha256_file, write_record
from maect.core.kept import keep
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig
from maect.evaluate.base import (
    EvaluationJob,
    Features,
    Interrupted,
    Left,
    Protocol,
    Shards,
    Trained,
    encoder_checksum,
)
from maect.evaluate.store import open_record

PACKAGES = ("numpy", "scipy", "scikit-learn", "cyanure", "umap-learn", "torch", "timm")


def evaluate(context: Context, *, config: str | Path, digest: str | None = None) -> str:
    """Evaluate as a resolved file says and write the JSON beside it; called on every rank.

    Args:
        context: this rank.
        config: `evaluations/RUN/NAME.yaml`, an `EvaluationConfig`.
        digest: of the file when the job was submitted.

    Returns:
        "done", or "requeue" if the job was told to stop and has saved its state.

    Raises:
        UserError: a file, setting or input that the protocol cannot use.
    """
    resolved = EvaluationConfig.read(config, submitted=digest)
    return run(context, job_of(resolved, Path(config)), resolved.settings)


def job_of(resolved: EvaluationConfig, config: Path) -> EvaluationJob:
    """The job that a resolved file describes; its result goes beside the file."""
    return EvaluationJob(
        resolved.run, config.with_suffix(".json"), resolved.inputs, resolved.resize
    )


def run(context: Context, job: EvaluationJob, protocol: Protocol) -> str:
    """Evaluate and write `job.out`, atomically; called on every rank.

    Returns:
        "done" or "requeue", as `evaluate`.
    """
    # Protocols on stored features use the cores of rank 0's node, through threads.
    if context.rank and not protocol.every_rank:
        return "done"
    # Before anything is computed, or a file beside the JSON replaced.
    encoder = evaluated_encoder(job, protocol) if context.rank == 0 else None
    try:
        metrics = protocol.evaluate(context, job)
    except Interrupted:
        return "requeue"
    if context.rank == 0:
        result = {
            "metrics": metrics,
            "settings": protocol.model_dump(mode="json") | {"resize": job.resize},
            "provenance": provenance(job, protocol, context.world_size, encoder)
            | {"test_data": protocol.test_data}
            | job.notes,
        }
        write_record(job.out, result)
        keep(outputs(job.out, protocol))
        shutil.rmtree(job.state, ignore_errors=True)
    return "done"


def outputs(out: Path, protocol: Protocol) -> list[Path]:
    """The files that an evaluation leaves, the JSON `out` last."""
    return [out.with_suffix(".safetensors"), out] if protocol.leaves else [out]


def completion(config: str | Path) -> Callable[[], bool]:
    """Whether the result of a resolved file is there: of this encoder, settings and inputs.

    Returns:
        A question that is cheap to repeat: weights and inputs are read here, once.

    Raises:
        UserError: an input that cannot be read, or a damaged encoder.
    """
    resolved = EvaluationConfig.read(config)
    job = job_of(resolved, Path(config))
    decisive = resolved.settings.decisive
    settings = decisive(resolved.settings.model_dump(mode="json")) | {"resize": job.resize}
    encoder, wanted = encoder_checksum(job.run), _sources(job, resolved.settings)

    def is_finished() -> bool:
        if not job.out.exists():
            return False
        result = read_json(job.out)
        about = result["provenance"]
        return (
            decisive(result["settings"]) == settings
            and about["encoder_sha256"] == encoder
            and about["splits"] == wanted["splits"]
            and about.get("inputs", {}) == wanted["inputs"]
        )

    return is_finished


def evaluated_encoder(job: EvaluationJob, protocol: Protocol) -> str | None:
    """sha256 of what is evaluated: the run's encoder or, without its file, that of the features.

    Raises:
        UserError: a damaged encoder, or features that were not made from it.
    """
    encoder = job.run / "encoder.safetensors"
    actual = encoder_checksum(job.run) if encoder.exists() else None
    declared = protocol.inputs().items()
    # A file that is missing, or two that do not belong together, the protocol itself refuses.
    paths = [
        job.path(name)
        for name, kind in declared
        if isinstance(kind, Features) and name in job.inputs and job.path(name).exists()
    ]
    made: list[str] = [open_record(path)["encoder_sha256"] for path in paths]
    for path, digest in zip(paths, made, strict=True):
        if actual not in (None, digest):
            raise UserError(f"{path}: made from another encoder than {encoder}; extract it again")
    return actual or (made[0] if made else None)


def provenance(
    job: EvaluationJob, protocol: Protocol, world_size: int, encoder_sha256: str | None
) -> dict[str, Any]:
    """Where a result comes from: run, encoder, data and versions."""
    versions = {"maect": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "protocol": protocol.name,
        "run": job.run.name,
        "encoder_sha256": encoder_sha256,
        **_sources(job, protocol),
        "world_size": world_size,
        "versions": versions,
    }


def _sources(job: EvaluationJob, protocol: Protocol) -> dict[str, dict[str, Any]]:
    """`splits`, with what is known of their features or images, and `inputs`, with checksums."""
    splits: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    keep = ("index_digest", "pooling", "image_size", "resize", "precision", "device", "sha256")
    declared = protocol.inputs()
    encoded = {kind.split for kind in declared.values() if isinstance(kind, Features)}
    for name, kind in declared.items():
        if isinstance(kind, Features):
            made = open_record(job.path(name))
            splits[name] = {key: made[key] for key in keep if key in made}
        elif isinstance(kind, Shards) and kind.split not in encoded:
            splits[name] = {"index_digest": open_index(job.path(name)).digest}
        elif isinstance(kind, Left):
            inputs[name] = sha256_file(job.path(name))
        elif isinstance(kind, Trained):
            inputs[name] = [encoder_checksum(run) for run in job.paths(name)]
    return {"splits": splits, "inputs": inputs}
