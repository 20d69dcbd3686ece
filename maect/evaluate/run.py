"""Run one protocol for one run and write its JSON: metrics, every setting, provenance."""

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maect import __version__
from maect.core.errors import UserError
from maect.core.files import read_json, sha256_file, write_json
from maect.core.settings import one_line
from maect.data.index import open_index
from maect.evaluate.base import Features, Left, Protocol, Shards
from maect.evaluate.job import Context, Interrupted, Job
from maect.evaluate.registry import PROTOCOLS
from maect.evaluate.store import open_record

PACKAGES = ("numpy", "scipy", "scikit-learn", "cyanure", "umap-learn", "torch", "timm")


def run_protocol(
    context: Context,
    *,
    protocol: str,
    run: str | Path,
    out: str | Path,
    inputs: dict[str, str] | None = None,
    resize: int | None = None,
    settings: dict[str, Any] | None = None,
) -> str:
    """Evaluate and write `out`, atomically; called on every rank.

    Args:
        context: this rank.
        protocol: a key of `maect.evaluate.PROTOCOLS`.
        run: folder of the run, with `encoder.safetensors`.
        out: the JSON to write.
        inputs: what the protocol declares, by name.
        resize: shorter side before the centre crop of evaluation images.
        settings: what differs from the protocol's defaults.

    Returns:
        "done", or "requeue" if the job was told to stop and has saved its state.

    Raises:
        UserError: unknown protocol or setting, or an input that the protocol cannot use.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol {protocol!r}; known: {', '.join(PROTOCOLS)}")
    try:
        values = PROTOCOLS[protocol].model_validate(settings or {})
    except ValidationError as error:
        raise one_line(error, protocol) from None
    # What a protocol does not read is no part of its provenance.
    given = {n: Path(path) for n, path in (inputs or {}).items() if n in values.inputs()}
    job = Job(run=Path(run), out=Path(out), inputs=given, resize=resize)
    # Protocols on stored features use the cores of rank 0's node, through threads.
    if context.rank and not values.every_rank:
        return "done"
    # Before anything is computed, or a file beside the JSON replaced.
    encoder = encoder_digest(job, values) if context.rank == 0 else None
    try:
        metrics = values.evaluate(context, job)
    except Interrupted:
        return "requeue"
    if context.rank == 0:
        result = {
            "metrics": metrics,
            "settings": values.model_dump(mode="json") | {"resize": resize},
            "provenance": provenance(job, values, context.world_size, encoder)
            | {"test_data": values.test_data}
            | job.notes,
        }
        write_json(out, result)
        shutil.rmtree(job.state, ignore_errors=True)
    return "done"


def is_finished(job: Job, protocol: Protocol) -> bool:
    """Whether the result is there, of this encoder, these settings and these inputs.

    Raises:
        UserError: an input that cannot be read.
    """
    if not job.out.exists():
        return False
    result = read_json(job.out)
    about, wanted = result["provenance"], _sources(job, protocol)
    then, now = (
        {name: made["index_digest"] for name, made in sources["splits"].items()}
        for sources in (about, wanted)
    )
    return (
        result["settings"] == protocol.model_dump(mode="json") | {"resize": job.resize}
        and about["encoder_sha256"] == sha256_file(job.run / "encoder.safetensors")
        and then == now
        and about.get("inputs", {}) == wanted["inputs"]
    )


def encoder_digest(job: Job, protocol: Protocol) -> str | None:
    """sha256 of what is evaluated: the run's encoder or, without its file, that of the features.

    Raises:
        UserError: an encoder that is not the one that its training left, or features that were
            not made from it.
    """
    encoder = job.run / "encoder.safetensors"
    actual: str | None = sha256_file(encoder) if encoder.exists() else None
    features = [name for name, kind in protocol.inputs().items() if isinstance(kind, Features)]
    # A file that is missing, or two that do not belong together, the protocol itself refuses.
    paths = [job.inputs[name] for name in features if name in job.inputs]
    paths = [path for path in paths if path.exists()]
    made: list[str] = [open_record(path)["encoder_sha256"] for path in paths]
    for path, digest in zip(paths, made, strict=True):
        if actual not in (None, digest):
            raise UserError(f"{path}: made from another encoder than {encoder}; extract it again")
    return actual or (made[0] if made else None)


def provenance(
    job: Job, protocol: Protocol, world_size: int, encoder_sha256: str | None
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


def _sources(job: Job, protocol: Protocol) -> dict[str, dict[str, Any]]:
    """`splits`, with what is known of their features or images, and `inputs`, with checksums."""
    splits: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    keep = ("index_digest", "pooling", "image_size", "resize", "precision", "device")
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
    return {"splits": splits, "inputs": inputs}
