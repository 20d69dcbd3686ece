"""Extraction of the features of a split, into the file that all protocols share (`store` reads it).

The split is cut into parts that depend on nothing but its size. Each rank encodes some parts and
writes each one when it is complete; rank 0 joins them. So a restarted job skips what is there, on
any number of ranks, and the world size does not change a bit of the result.
"""

import shutil
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from maect.core import distributed
from maect.core.arrays import read_arrays, seek_arrays, write_arrays
from maect.core.context import Context
from maect.core.errors import SupersededError, UserError
from maect.core.settings import digest
from maect.data.index import Index, open_index
from maect.data.loader import evaluation_parts
from maect.evaluate import FeaturesConfig
from maect.evaluate.base import encoder_checksum
from maect.evaluate.encoding import Encoding
from maect.evaluate.store import write_features
from maect.models.precision import Precision

PART_ROWS = 8192
LEAST_PARTS = 16


def features(context: Context, *, config: str | Path, digest: str | None = None) -> str:
    """Write the features that `features/RUN/DATASET-SPLIT.yaml` describes, on every rank.

    `digest` is that of the file when the job was submitted; returns as `extract`.
    """
    read = FeaturesConfig.read(config, submitted=digest)
    encoder = read.run / "encoder.safetensors"
    out = Path(config).with_suffix(".safetensors")
    return extract(context, encoder=encoder, shards=read.shards, out=out, **read.how)


@distributed.explain_out_of_memory()
def extract(
    context: Context,
    *,
    encoder: str | Path,
    shards: str | Path,
    out: str | Path,
    resize: int | None = None,
    precision: Literal["fp32", "tf32", "bf16"] = "fp32",
    norm: bool = True,
    blocks: int = 1,
) -> str:
    """Write the features of a split (see `maect.evaluate.store`); called on every rank.

    Args:
        resize: shorter side before the centre crop; none: 256/224 of the encoder's image size.
        precision: of the encoder's forward pass. Float32 without TF32 gives the same features on
            all machines up to rounding. Where there is no TF32, on CPUs, it is float32.
        norm: whether the encoder's final norm is applied.
        blocks: the raw output of this many last blocks side by side, earliest first.

    Returns:
        "done", or "requeue" if the job was asked to stop; a restart resumes from there.

    Raises:
        UserError: an input is missing or damaged, or the features are not finite.
    """
    encoder, out = Path(encoder), Path(out)
    index = open_index(shards)
    device = distributed.device_of(context)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    products: Precision = "bf16" if precision == "bf16" else "fp32"
    model = Encoding(encoder, device, products, norm=norm, blocks=blocks)
    index.check_channels(model.settings.pixels.channels)
    resize = resize or model.settings.default_resize
    record = {
        "run": encoder.parent.name,
        "encoder_sha256": encoder_checksum(encoder.parent),
        "index_digest": index.digest,
        "split": index.record["split"],
        "class_names": list(index.class_names),
        "pooling": model.pooling,
        "image_size": model.settings.image_size,
        "resize": resize,
        "precision": precision,
        "norm": norm,
        "blocks": blocks,
        "device": model.device.type,
        "torch": torch.__version__,
    }
    folder = out.with_name(f".{out.name}.parts")
    files = [
        folder / f"{digest(record)}-{number:06d}.safetensors"
        for number in range(len(part_ranges(index.n)))
    ]
    with distributed.process_group(context):
        todo = [
            number for number, file in enumerate(files) if seek_arrays(file, "features") is None
        ]
        todo = distributed.from_rank_0(todo)
        mine = np.array_split(np.array(todo, int), context.world_size)[context.rank]
        missing = sum(len(part_ranges(index.n)[number]) for number in todo)
        complete = _encode(context, index, model, resize, files, mine.tolist(), missing)
        # Also the barrier: nobody joins parts before all are written.
        stopped = distributed.any_rank(not complete)
    if stopped:
        return "requeue"
    if context.rank == 0:
        if not context.is_current():
            raise SupersededError(f"{out}: another job has taken these features over")
        keys = index.keys()
        width = model.width
        labels = np.array(index.labels)
        parts = (read_arrays(file)[0]["features"] for file in files)
        write_features(
            out, parts, width=width, labels=labels, keys=keys, record=record,
            contents=index.contents,
        )  # fmt: skip
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
    """Encode and write some of the missing parts; False if asked to stop before the last."""
    ranges = part_ranges(index.n)
    batch = model.batch_size
    pieces = [
        (number, start, ranges[number][start : start + batch])
        for number in numbers
        for start in range(0, len(ranges[number]), batch)
    ]
    ours = sum(len(rows) for _, _, rows in pieces)
    started = time.monotonic()
    done = 0
    batches = evaluation_parts(
        index,
        image_size=model.settings.image_size,
        parts=[rows for _, _, rows in pieces],
        threads=context.cpus,
        resize=resize,
    )
    for (number, start, rows), (images, _, _) in zip(pieces, batches, strict=True):
        if start == 0:
            out = np.empty((len(ranges[number]), model.width), np.float32)
        out[start : start + len(rows)] = model(images).cpu().numpy()
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
        write_arrays(files[number], {"features": out}, {})
        context.saved(step)
    return True
