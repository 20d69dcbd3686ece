"""Run one protocol for one run and write its JSON: metrics, every setting, provenance."""

import importlib
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maect import __version__
from maect.core.errors import UserError
from maect.core.files import sha256_file, write_json
from maect.core.settings import one_line
from maect.data.index import open_index
from maect.evaluate import PROTOCOLS
from maect.evaluate.job import Context, Interrupted, Job
from maect.evaluate.store import open_record

PACKAGES = ("numpy", "scipy", "scikit-learn", "cyanure", "umap-learn", "torch", "timm")


def run_protocol(
    context: Context,
    *,
    protocol: str,
    run: str | Path,
    out: str | Path,
    train: str | Path | None = None,
    test: str | Path | None = None,
    train_shards: str | Path | None = None,
    test_shards: str | Path | None = None,
    splits: dict[str, str] | None = None,
    probe: str | Path | None = None,
    clusters: str | Path | None = None,
    resize: int | None = None,
    settings: dict[str, Any] | None = None,
) -> str:
    """Evaluate and write `out`, atomically; called on every rank.

    Args:
        context: this rank's place.
        protocol: a key of `maect.recipes.PROTOCOLS`, and a module of this package.
        run: folder of the run, with `encoder.safetensors`.
        out: the JSON to write.
        train, test: features files, for protocols on stored features.
        train_shards, test_shards: folders of shards, for protocols that run the encoder.
        splits: folders of shards of further splits, by name.
        probe, clusters: what a linear probe and a clustering of the same encoder left.
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
    module = importlib.import_module(f"maect.evaluate.{protocol}")
    paths = {
        **{"train": train, "test": test, "train_shards": train_shards, "test_shards": test_shards},
        **{"probe": probe, "clusters": clusters},
    }
    # What a protocol does not read is no part of its provenance.
    given: dict[str, Any] = {
        n: Path(path) for n, path in paths.items() if n in module.INPUTS and path is not None
    }
    more = {name: Path(path) for name, path in (splits or {}).items()}
    more = more if "splits" in module.INPUTS else {}
    job = Job(run=Path(run), out=Path(out), resize=resize, splits=more, **given)
    # Protocols on stored features use the cores of rank 0's node, through threads.
    if context.rank and not getattr(module, "ON_EVERY_RANK", False):
        return "done"
    # Before anything is computed, or a file beside the JSON replaced.
    encoder = encoder_digest(job) if context.rank == 0 else None
    try:
        metrics = module.evaluate(context, job, values)
    except Interrupted:
        return "requeue"
    if context.rank == 0:
        result = {
            "metrics": metrics,
            "settings": values.model_dump(mode="json") | {"resize": resize},
            "provenance": provenance(job, protocol, context.world_size, encoder)
            | {"test_data": getattr(module, "TEST_DATA", None)}
            | job.notes,
        }
        write_json(out, result)
        shutil.rmtree(job.state, ignore_errors=True)
    return "done"


def encoder_digest(job: Job) -> str | None:
    """sha256 of what is evaluated: the run's encoder or, without its file, that of the features.

    Raises:
        UserError: features that were not made from the run's encoder.
    """
    encoder = job.run / "encoder.safetensors"
    found: str | None = sha256_file(encoder) if encoder.exists() else None
    # A file that is missing, or two that do not belong together, the protocol itself refuses.
    paths = [path for path in (job.train, job.test) if path is not None and path.exists()]
    made: list[str] = [open_record(path)["encoder_sha256"] for path in paths]
    for path, digest in zip(paths, made, strict=True):
        if found not in (None, digest):
            raise UserError(f"{path}: made from another encoder than {encoder}; extract it again")
    return found or (made[0] if made else None)


def provenance(
    job: Job, protocol: str, world_size: int, encoder_sha256: str | None
) -> dict[str, Any]:
    """Where a result comes from: run, encoder, data and versions."""
    record: dict[str, Any] = {
        "protocol": protocol,
        "run": job.run.name,
        "encoder_sha256": encoder_sha256,
        "splits": {},
        "inputs": {},
        "world_size": world_size,
        "versions": {"maect": __version__, "python": platform.python_version()},
    }
    for name, path in (("train", job.train), ("test", job.test)):
        if path is None:
            continue
        made = open_record(path)
        keep = ("index_digest", "pooling", "image_size", "resize", "precision", "device")
        record["splits"][name] = {key: made[key] for key in keep if key in made}
    shards = {"train": job.train_shards, "test": job.test_shards, **job.splits}
    for name, path in shards.items():
        if path is not None:
            record["splits"].setdefault(name, {})["index_digest"] = open_index(path).digest
    for name, path in (("probe", job.probe), ("clusters", job.clusters)):
        if path is not None:
            record["inputs"][name] = sha256_file(path)
    for package in PACKAGES:
        try:
            record["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    return record
