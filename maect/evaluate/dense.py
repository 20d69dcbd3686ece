"""Dense evaluation: patch tokens, the classes of their pixels, and mIoU.

Images and masks are two splits of a data set, joined by the names of their samples. Whole images
are squeezed into the encoder's square, as CAPI does (facebookresearch/capi, eval_segmentation.py).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.index import HEIGHT, WIDTH, Index, open_index
from maect.evaluate.base import (
    Encodes,
    EvaluationJob,
    Images,
    Input,
    Shards,
    encoder_checksum,
    idle_cpus,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from maect.evaluate.encoding import Encoding
    from maect.evaluate.store import Array

Known: TypeAlias = "tuple[Array, NDArray[np.uint8]]"
CLASSES = 256  # numbers that a mask may hold
_AT_ONCE = 64


class Masked(Encodes):
    """Base of the protocols on images whose every pixel has a class."""

    labelled: ClassVar[bool] = False  # masks say what is where

    precision: Literal["fp32", "bf16"] = "fp32"
    train_masks: str = "train_masks"
    test_masks: str = "val_masks"
    ignore: tuple[int, ...] = (0, 255)
    """Numbers in masks that count as no class: ADE20K's. VOC's background is a class: [255]."""
    seed: int = 0
    """Of the images that are held out."""

    def inputs(self) -> dict[str, Input]:
        """Images and masks of both splits."""
        return {
            "train": Shards(self.train_split),
            "train_masks": Shards(self.train_masks),
            "test": Shards(self.test_split),
            "test_masks": Shards(self.test_masks),
        }


class PatchClassifier(Masked):
    """Base of the protocols that classify patches; settings are chosen on held-out images."""

    one_in: int = Field(default=10, gt=1)
    """One training image in this many is held out to choose settings on."""
    patches_one_in: int = Field(default=1, gt=0)
    """Learn from every so many-th training patch alone, which takes less time."""

    def encoded(self, images: Images) -> float:
        """Count both splits once."""
        return images(self.train_split) + images(self.test_split)

    def patches(self, context: Context, job: EvaluationJob) -> dict[str, Patches] | None:
        """Encode `train` (without what is held out), `held` and `test`; standardised.

        Returns:
            The patches of each; None on other ranks than 0, which are done.
        """
        import numpy as np

        from maect.core import distributed
        from maect.data.subsets import drawn
        from maect.evaluate.encoding import Encoding
        from maect.evaluate.store import in_memory, moments, standardize

        encoding = Encoding(
            job.run / "encoder.safetensors", distributed.device_of(context), self.precision
        )
        found = {}
        with distributed.process_group(context):
            for split in ("train", "test"):
                index = open_index(job.path(split))
                index.check_channels(encoding.settings.pixels.channels)
                masks = MaskSplit(index, open_index(job.path(f"{split}_masks")))
                features = encoded(context, index, encoding)
                found[split] = features, masks
        if context.rank:
            return None
        images = found["train"][1].images
        held = drawn(images, max(1, images.n // self.one_in), self.seed)
        if not held.any() or held.all():
            raise UserError(f"{job.path('train')}: needs two images or more, to hold one out")
        threads, size = idle_cpus(context), encoding.settings.image_size
        parts = {}
        for split, (features, masks) in found.items():
            if not np.isfinite(features).all():
                raise UserError(f"{job.run}: the features are not finite; the encoder diverged")
            classes = masks.patches(size, features.shape[1], threads)
            parts[split] = Patches(features, classes)
        train = parts["train"]
        parts["held"], parts["train"] = train.of(held), train.of(~held)
        scale = moments(in_memory(parts["train"].rows()))
        return {
            name: Patches(standardize(part.features, scale), part.classes)
            for name, part in parts.items()
        }

    def learnt(self, *parts: Patches) -> Known:
        """Features [n, D] and classes of pixels [n, p] of patches to learn from.

        Left out are patches whose most frequent number is ignored.
        """
        import numpy as np

        features = np.concatenate([part.rows() for part in parts])[:: self.patches_one_in]
        classes = np.concatenate([part.pixels() for part in parts])[:: self.patches_one_in]
        kept = ~np.isin(most_frequent(classes), self.ignore)
        if not kept.any():
            raise UserError(f"all masks hold only the numbers {[*self.ignore]}, which are ignored")
        return features[kept], classes[kept]

    def settings(self) -> list[dict[str, Any]]:
        """List the settings to choose from."""
        raise NotImplementedError

    def predicted(
        self, known: Known, queries: Array, settings: list[dict[str, Any]], threads: int
    ) -> list[NDArray[np.uint8]]:
        """Return the class of each pixel of patches, uint8 [q, p], by each of the settings.

        Args:
            known: training patches, as `learnt` gives them.
            queries: features of the patches, float32 [q, D].
        """
        raise NotImplementedError

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """mIoU in percent under the protocol's name, and the setting that was chosen.

        A killed job does not choose again. docs/reference/dense.md lists the metrics.
        """
        parts = self.patches(context, job)
        if parts is None:
            return {}
        train, held, test = parts["train"], parts["held"], parts["test"]
        threads, settings = idle_cpus(context), self.settings()

        def tried() -> list[dict[str, Any]]:
            found = self.predicted(self.learnt(train), held.rows(), settings, threads)
            scores = [miou(held.pixels(), classes, self.ignore)[0] for classes in found]
            return [{**one, "miou": score} for one, score in zip(settings, scores, strict=True)]

        read = [open_index(job.path(name)).digest for name in self.inputs()]
        held_out = job.once(context, digest(self, encoder_checksum(job.run), read), tried)
        best = max(held_out, key=itemgetter("miou"))  # of equal ones the first
        chosen = settings[held_out.index(best)]
        (classes,) = self.predicted(self.learnt(train, held), test.rows(), [chosen], threads)
        mean, each, accuracy = miou(test.pixels(), classes, self.ignore)
        own = {self.name: mean, f"{self.name}_accuracy": accuracy, f"{self.name}_classes": each}
        return own | chosen | {"held_out": held_out}


@dataclass(frozen=True)
class Patches:
    """Patch tokens of images and the classes of their pixels.

    Attributes:
        features: float32 [images, N, D].
        classes: uint8 [images, N, p], p pixels of each patch.
    """

    features: Array
    classes: NDArray[np.uint8]

    def of(self, images: NDArray[np.bool_]) -> Patches:
        """Those of some images."""
        return Patches(self.features[images], self.classes[images])

    def rows(self) -> Array:
        """Features of all patches, [images * N, D]."""
        return self.features.reshape(-1, self.features.shape[2])

    def pixels(self) -> NDArray[np.uint8]:
        """Classes of all patches' pixels, [images * N, p]."""
        return self.classes.reshape(-1, self.classes.shape[2])


def _stems(index: Index, is_planned: bool) -> list[str]:
    """Names of all samples below their source, without extension; a UserError if two agree.

    A key will do only if no plan says the names: a long one ends in a checksum of the whole name.
    """
    from maect.data.shard_plan import image_names

    names = image_names(index) if is_planned else index.keys()
    stems = [os.path.splitext(name)[0] for name in names]
    stem, times = Counter(stems).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{index.directory}: {times} files are called {stem!r}, with different endings; a mask "
            "has the name of one image"
        )
    return stems


class MaskSplit:
    """The masks of a split's images, in the images' order."""

    def __init__(self, images: Index, masks: Index) -> None:
        """Join them by name; a UserError if an image has no mask, or one of another size."""
        self.images, self.masks = images, masks
        needed = [
            one.directory / name for one in (images, masks) for name in ("plan.json", "parts")
        ]
        is_planned = all(path.exists() for path in needed)
        names, of_masks = _stems(images, is_planned), _stems(masks, is_planned)
        by_name = {name: row for row, name in enumerate(of_masks)}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise UserError(
                f"{masks.directory}: no mask {missing[0]!r}, nor of {len(missing) - 1} others of "
                f"{images.directory}; a mask has the name of its image"
            )
        self.rows = [by_name[name] for name in names]
        sides = [WIDTH, HEIGHT]
        differ = (images.rows[:, sides] != masks.rows[self.rows][:, sides]).any(axis=1)
        if differ.any():
            name = images.key(int(differ.argmax()))
            raise UserError(f"{masks.directory}: the mask of {name!r} is not of the image's size")

    def read(self, number: int) -> NDArray[np.uint8]:
        """The mask of an image, uint8 [height, width]; a UserError if it is no such picture."""
        import numpy as np

        from maect.data.decode import UnreadableError, open_image

        row = self.rows[number]
        data = self.masks.read(row)
        # Pillow spreads grey of 2 or 4 bits over 0 to 255.
        few_bits = data[:4] == b"\x89PNG" and data[25:26] == b"\0" and data[24] < 8
        try:
            with open_image(data) as (image, _):
                if image.mode not in ("L", "P") or few_bits:
                    depth = f"{data[24]}-bit grey" if few_bits else f"the mode {image.mode}"
                    raise UserError(
                        f"{self.masks.directory}: {self.masks.key(row)!r} has pixels of {depth}; "
                        "a mask has one number 0 to 255 for each, in 8 bits"
                    )
                return np.asarray(image)
        except UnreadableError as error:
            raise self.masks.undecodable(row, error) from None

    def numbers(self, threads: int) -> list[int]:
        """The numbers that occur in the masks, in order."""
        import numpy as np

        with ThreadPoolExecutor(max(1, threads)) as pool:
            found = list(pool.map(lambda n: np.unique(self.read(n)), range(len(self.rows))))
        return np.unique(np.concatenate(found)).tolist()

    def patches(self, size: int, patches: int, threads: int) -> NDArray[np.uint8]:
        """The `size` x `size` nearest pixels of masks, in patches: uint8 [images, patches, p]."""
        import numpy as np
        from PIL import Image

        grid = math.isqrt(patches)
        if grid * grid != patches or size % grid:
            raise UserError(f"{patches} patches do not tile {size} x {size} pixels")
        p = size // grid
        out = np.empty((len(self.rows), patches, p * p), np.uint8)

        def cut(number: int) -> None:
            mask = Image.fromarray(self.read(number), "L")
            squeezed = np.asarray(mask.resize((size, size), Image.Resampling.NEAREST))
            cells = squeezed.reshape(grid, p, grid, p).transpose(0, 2, 1, 3)
            out[number] = cells.reshape(patches, p * p)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(cut, range(len(self.rows))))
        return out


def encoded(context: Context, index: Index, encoding: Encoding) -> Array:
    """Patch tokens after the final norm, float32 [images, N, D]; every rank encodes a share."""
    import torch

    from maect.core import distributed
    from maect.data.loader import evaluation_parts

    per_rank = -(-index.n // (context.world_size * _AT_ONCE)) * _AT_ONCE
    mine = range(index.n)[context.rank * per_rank : (context.rank + 1) * per_rank]
    parts = [mine[start : start + _AT_ONCE] for start in range(0, len(mine), _AT_ONCE)]
    size, threads = encoding.settings.image_size, max(1, context.cpus)
    out = None
    done = 0
    for images, _, _ in evaluation_parts(
        index, image_size=size, parts=parts, threads=threads, squeezed=True
    ):
        tokens = encoding.output(images, "last").patch_tokens().float()
        if out is None:
            out = torch.zeros(per_rank, *tokens.shape[1:], device=encoding.device)
        out[done : done + len(images)] = tokens
        done += len(images)
        context.report({"step": done, "steps": len(mine)})
    if out is None:  # a rank without images still takes part
        channels = encoding.settings.pixels.channels
        blank = encoding.output(torch.zeros(1, channels, size, size, dtype=torch.uint8))
        out = torch.zeros(per_rank, *blank.patch_tokens().shape[1:], device=encoding.device)
    return distributed.gather_rows(out)[: index.n].cpu().numpy()


def most_frequent(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The most frequent number of each row, of several the smallest: [n, p] to [n]."""
    import torch

    return torch.from_numpy(classes).mode(dim=1).values.numpy()


def miou(
    truth: NDArray[np.uint8], predicted: NDArray[np.uint8], ignore: tuple[int, ...]
) -> tuple[float, dict[str, float], float]:
    """Mean intersection over union of classes, of all pixels together.

    Pixels whose true number is ignored do not count. The mean is over the numbers that occur among
    the other pixels, true or predicted (as scikit-learn's and CAPI's).

    Args:
        truth: uint8, of any shape.

    Returns:
        mIoU, IoU of each number, and the accuracy of pixels, in percent.
    """
    return iou_of(pairs_of(truth, predicted, ignore), ignore)


def pairs_of(
    truth: NDArray[np.uint8], predicted: NDArray[np.uint8], ignore: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return how many pixels that count have each true and predicted number, int64 [256 * 256]."""
    import numpy as np

    counted = ~np.isin(truth, ignore)
    pairs = truth[counted].astype(np.int64) * CLASSES + predicted[counted]
    return np.bincount(pairs, minlength=CLASSES**2)


def iou_of(
    pairs: NDArray[np.int64], ignore: tuple[int, ...]
) -> tuple[float, dict[str, float], float]:
    """`miou` of counted pairs, [256 * 256]."""
    import numpy as np

    if not pairs.any():
        raise UserError(f"all test masks hold only the numbers {[*ignore]}, which are ignored")
    table = pairs.reshape(CLASSES, CLASSES)
    both = table.diagonal()
    union = table.sum(axis=0) + table.sum(axis=1) - both
    present = np.flatnonzero(union)
    each = {str(number): float(100 * both[number] / union[number]) for number in present.tolist()}
    return float(np.mean([*each.values()])), each, float(100 * both.sum() / table.sum())
