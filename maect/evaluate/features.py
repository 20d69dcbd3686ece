"""Extract an encoder's features of a split once, for all protocols that need them.

The split is cut into parts that depend on nothing but its size. Each rank encodes some parts and
writes each one when it is whole; rank 0 joins them. So a restarted job skips what is there, on
any number of ranks, and the world size does not change a bit of the result.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import atomic_write
from maect.core.settings import digest
from maect.data.index import Index, open_index
from maect.data.loader import evaluation_batches, evaluation_parts
from maect.evaluate.encoding import Encoding
from maect.evaluate.job import encoder_checksum
from maect.evaluate.store import write_features
from maect.models.vit import Precision

BATCH = 256
PART_ROWS = 8192
LEAST_PARTS = 16


def extract(
    context: Context,
    *,
    encoder: str | Path,
    shards: str | Path,
    out: str | Path,
    resize: int | None = None,
    precision: Precision = "fp32",
) -> str:
    """Write the features of a split (see `maect.evaluate.store`); called on every rank.

    Args:
        context: this rank.
        encoder: `encoder.safetensors` of a run.
        shards: folder of the split's shards.
        out: the features file.
        resize: shorter side before the centre crop; none: 256/224 of the encoder's image size.
        precision: of the encoder's forward pass. Full float32, without TF32, by default: the
            features of an image are then the same on all machines up to rounding.

    Returns:
        "done", or "requeue" if the job was told to stop; a restart goes on from there.

    Raises:
        UserError: an input is missing or damaged, or the features are not finite.
    """
    encoder, out = Path(encoder), Path(out)
    index = open_index(shards)
    model = Encoding(encoder, distributed.device_of(context), precision)
    resize = resize or round(model.settings.image_size * 256 / 224)
    record = {
        "run": encoder.parent.name,
        "encoder_sha256": encoder_checksum(encoder.parent),
        "index_digest": index.digest,
        "class_names": list(index.class_names),
        "pooling": model.pooling,
        "image_size": model.settings.image_size,
        "resize": resize,
        "precision": precision,
        "device": model.device.type,
        "torch": torch.__version__,
    }
    folder = out.with_name(f".{out.name}.parts")
    files = [
        folder / f"{digest(record)}-{number:06d}.safetensors"
        for number in range(len(part_ranges(index.n)))
    ]
    with distributed.process_group(context):
        todo = [number for number, file in enumerate(files) if not _whole(file)]
        todo = distributed.from_rank_0(todo)
        mine = np.array_split(np.array(todo, int), context.world_size)[context.rank]
        missing = sum(len(part_ranges(index.n)[number]) for number in todo)
        whole = _encode(context, index, model, resize, files, mine.tolist(), missing)
        # Also the barrier: nobody joins parts before all are written.
        stopped = distributed.any_rank(not whole)
    if stopped:
        return "requeue"
    if context.rank == 0:
        keys = index.keys()
        width, labels = model.width, np.array(index.labels)
        write_features(out, map(_read, files), width=width, labels=labels, keys=keys, record=record)
        shutil.rmtree(folder)
    return "done"


def part_ranges(n: int) -> list[range]:
    """Consecutive ranges of rows that are encoded and written as one, a function of n alone."""
    size = max(1, min(PART_ROWS, -(-n // LEAST_PARTS)))
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def _encode(
    context: Context,
    index: Index,
    model: Encoding,
    resize: int,
    files: list[Path],
    numbers: list[int],
    missing: int,
) -> bool:
    """Encode and write some of the missing parts; False if told to stop before the last."""
    ranges = part_ranges(index.n)
    pieces = [
        (number, start, ranges[number][start : start + BATCH])
        for number in numbers
        for start in range(0, len(ranges[number]), BATCH)
    ]
    ours = sum(len(rows) for _, _, rows in pieces)
    started, done = time.monotonic(), 0
    encoded = _features(context, index, model, resize, [rows for _, _, rows in pieces])
    for (number, start, rows), features in zip(pieces, encoded, strict=True):
        if start == 0:
            out = np.empty((len(ranges[number]), model.width), np.float32)
        out[start : start + len(rows)] = features
        done += len(rows)
        speed = context.world_size * done / max(time.monotonic() - started, 1e-9)
        # Parts of earlier attempts count: what grows from attempt to attempt is progress.
        step = index.n - missing + missing * done // ours
        context.report({"step": step, "steps": index.n, "images_per_second": speed})
        if context.stop_requested():
            return False
        if start + len(rows) < len(out):
            continue
        if not np.isfinite(out).all():
            row = ranges[number][int(np.argmin(np.isfinite(out).all(axis=1)))]
            raise UserError(
                f"{index.directory}: the features of sample {row} ({index.key(row)}) are not "
                "finite; the encoder diverged or its weights are damaged"
            )
        with atomic_write(files[number]) as temporary:
            save_file({"features": out}, temporary, {"sha256": _sha256(out)})
        context.saved(step)
    return True


def _features(
    context: Context, index: Index, model: Encoding, resize: int, parts: list[range]
) -> Iterator[NDArray[np.float32]]:
    """Features of every part; the device has the next one already when a part is fetched."""
    previous = None
    for images, _, _ in evaluation_parts(
        index,
        image_size=model.settings.image_size,
        parts=parts,
        threads=context.cpus,
        resize=resize,
    ):
        features = model(images)
        if previous is not None:
            yield previous.cpu().numpy()
        previous = features
    if previous is not None:
        yield previous.cpu().numpy()


def batches(
    index: Index, model: Encoding, resize: int | None, rows: range, threads: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Features of `rows`: offset within `rows`, and float32 [b, width] on the model's device."""
    size = model.settings.image_size
    start = 0
    for images, _, _ in evaluation_batches(
        index, image_size=size, resize=resize, rows=rows, batch_size=BATCH, threads=threads
    ):
        yield start, model(images)
        start += len(images)


def _sha256(features: NDArray[np.float32]) -> str:
    import hashlib

    return hashlib.sha256(features.data).hexdigest()


def _whole(file: Path) -> bool:
    """Whether a part is there and undamaged; a damaged one is made again."""
    if not file.exists():
        return False
    try:
        _read(file)
    except (SafetensorError, OSError, ValueError, KeyError):
        return False
    return True


def _read(file: Path) -> NDArray[np.float32]:
    with safe_open(file, framework="numpy") as handle:
        metadata: dict[str, Any] = handle.metadata() or {}
        features: NDArray[np.float32] = handle.get_tensor("features")
    if _sha256(features) != metadata["sha256"]:
        raise ValueError(f"{file}: damaged")
    return features
