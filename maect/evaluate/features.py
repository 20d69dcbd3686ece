"""Features of a frozen encoder, as all evaluations read them; and those of a split, in a file.

All protocols share the file of a split (`store` reads it). The split is cut into parts that depend
on nothing but its size. Each rank encodes some parts and writes each one when it is complete; rank
0 joins them. So a restarted job skips what is there, on any number of ranks, and the world size
does not change a bit of the result.
"""

import shutil
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from maect.core import distributed
from maect.core.arrays import read_arrays, seek_arrays, write_arrays
from maect.core.context import Context
from maect.core.errors import SupersededError, UserError, explain_out_of_memory
from maect.core.settings import digest
from maect.data.index import Index, open_index
from maect.data.loader import evaluation_parts
from maect.data.transforms import normalize
from maect.evaluate import FeaturesConfig
from maect.evaluate.base import encoder_checksum
from maect.evaluate.store import write_features
from maect.models.kernels import Precision, mixed_precision
from maect.models.vit import EncoderOutput
from maect.models.weights import load_any_encoder
from maect.records import need_encoder
from maect.train.scores import BATCH

PART_ROWS = 8192
LEAST_PARTS = 16
ON_CPU, CACHED = 32, 80_000_000
"""Images of a batch on a CPU at least, and bytes of what its widest layers give."""


class Encoding:
    """Encoder, pooling and precision.

    Attributes:
        pooling: what its file says: "cls" or "mean" (of the patch tokens, after the final norm) or
            "fc_norm" (the norm after the mean); or "head", as timm's own head pools.
        blocks: whose features are given: the number of last blocks, earliest first.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        precision: Precision = "fp32",
        *,
        blocks: int = 1,
        pooling: Literal["cls", "mean"] | None = None,
        other_pooling: bool = False,
        norm: bool = True,
    ) -> None:
        """Load an encoder.

        Args:
            precision: bf16 runs under autocast; the features are float32 in any case.
            blocks: concatenate what this many last blocks give, or all if there are fewer: the
                raw output of the earlier ones; only the last is normed.
            pooling: instead of the one that its file says.
            other_pooling: append the last block's other pooling (of an encoder with [CLS] token).
            norm: whether the final norm is applied to the last block.

        Raises:
            UserError: no such encoder, or no [CLS] token to pool.
        """
        need_encoder(path)
        self.encoder, self.settings, own = load_any_encoder(path)
        self.pooling = pooling or own
        if self.pooling == "cls" and not self.settings.class_token:
            raise UserError(f"{path}: has no [CLS] token, which this evaluation reads")
        self.encoder.to(device).requires_grad_(False).eval()
        self.device, self.precision, self.norm = device, precision, norm
        depth = self.settings.depth
        self.blocks = min(blocks, depth)
        self._earlier = range(depth - self.blocks, depth - 1)
        self.other: Literal["cls", "mean"] | None = None
        if other_pooling and self.settings.class_token:
            self.other = "mean" if self.pooling in ("cls", "mean_cls") else "cls"
        outputs = self.blocks if self.other is None else self.blocks + 1
        self.width = self.settings.width * outputs

    @property
    def batch_size(self) -> int:
        """Images at once that suit the device: on a CPU, larger ones leave its caches."""
        if self.device.type != "cpu":
            return BATCH
        shape = self.settings
        widest = 4 * 4 * (1 + shape.patches) * shape.width  # bytes of an image's hidden layer
        return max(ON_CPU, min(BATCH, CACHED // widest))

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images, float32 [b, width] on the encoder's device.

        Args:
            images: uint8 [b, C, S, S], or float32, normalized.
        """
        with torch.inference_mode():
            return self._features(self._ready(images))

    def _features(self, images: Tensor) -> Tensor:
        # The norm after the mean is that of the last block, as the final norm would be.
        mean = "mean" if self.pooling in ("fc_norm", "head") else self.pooling
        norm: Literal["last", "none"] = "last" if self.norm else "none"
        with mixed_precision(self.device, self.precision):
            features = self.encoder(images, blocks=self._earlier, norm=norm, pooling=mean)
        last = features.tokens.float()  # a mean in full precision
        parts = [features.blocks[number].float() for number in self._earlier]
        parts.append(self.encoder.pool(last, self.pooling if self.norm else mean))
        if self.other is not None:
            parts.append(self.encoder.pool(last, self.other))
        return torch.cat(parts, dim=1)

    def output(self, images: Tensor, norm: Literal["last", "none"] = "none") -> EncoderOutput:
        """Return all tokens of the last block, before the final norm or after it.

        Args:
            images: uint8 [b, C, S, S], or float32, normalized.
            norm: "last" applies the final norm.

        Returns:
            On the encoder's device, in the precision that the blocks run in.
        """
        with torch.no_grad(), mixed_precision(self.device, self.precision):
            features: EncoderOutput = self.encoder(self._ready(images), norm=norm)
        return features

    def _ready(self, images: Tensor) -> Tensor:
        images = distributed.to_device_async(images, self.device)
        if images.dtype == torch.uint8:
            images = normalize(images, self.settings.pixels)
        return images


class LastBlocks(Encoding):
    """[CLS] and patch mean of the encoder's output, and of its last raw blocks, side by side.

    Columns: [CLS] and mean of the output; [CLS] of each block, earliest first; their means. Of an
    encoder without [CLS] token the means alone.
    """

    def __init__(self, path: Path, device: torch.device, precision: Precision, blocks: int) -> None:
        """Load an encoder, as `Encoding`, to read its last `blocks` blocks, or all of fewer."""
        super().__init__(path, device, precision, blocks=blocks)
        self.poolings: tuple[Literal["cls", "mean"], ...] = ("cls", "mean")
        if not self.settings.class_token:
            self.poolings = ("mean",)
        self.width = self.settings.width * (1 + self.blocks) * len(self.poolings)

    def _features(self, images: Tensor) -> Tensor:
        depth = self.settings.depth
        last = range(depth - self.blocks, depth)
        with mixed_precision(self.device, self.precision):
            features = self.encoder(images, blocks=last)
        sources = ([features.tokens], [features.blocks[number] for number in last])
        parts = [
            self.encoder.pool(tokens.float(), pooling)
            for source in sources
            for pooling in self.poolings
            for tokens in source
        ]
        return torch.cat(parts, dim=1)


def check_finite(features: Tensor, run: Path) -> None:
    """Refuse a broken encoder, by a UserError: a feature that is not finite."""
    if not torch.isfinite(features).all():
        raise UserError(
            f"{run}: the features are not finite; the encoder diverged or its weights are damaged"
        )


def features(context: Context, *, config: str | Path, digest: str | None = None) -> str:
    """Write the features that `features/RUN/DATASET-SPLIT.yaml` describes, on every rank.

    `digest` is that of the file when the job was submitted; returns as `extract`.
    """
    read = FeaturesConfig.read(config, submitted=digest)
    encoder = read.run / "encoder.safetensors"
    out = Path(config).with_suffix(".safetensors")
    return extract(context, encoder=encoder, shards=read.shards, out=out, **read.how)


@explain_out_of_memory()
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
        "reading": index.reading,
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
