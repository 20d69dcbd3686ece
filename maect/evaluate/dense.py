"""Dense evaluation: patch tokens, the classes of their pixels, and mIoU.

Images and masks are two splits of a data set, joined by the names of their samples. Whole images
are squeezed into the encoder's square, as CAPI does (facebookresearch/capi, eval_segmentation.py).
"""

import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.decode import UnreadableError, open_image
from maect.data.index import HEIGHT, WIDTH, Index
from maect.data.shard_plan import image_names
from maect.evaluate.features import Encoding
from maect.evaluate.store import Array
from maect.train.scores import encode_share

CLASSES = 256  # numbers that a mask may hold
_AT_ONCE = 64


def _stems(index: Index, is_planned: bool) -> list[str]:
    """Return all samples' names without extension; raise UserError if two are equal.

    A key will do only if no plan says the names: a long one ends in a checksum of the whole name.
    """
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
        """Join images and masks by name; raise UserError if a mask is missing or does not fit."""
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
        """Read an image's mask, uint8 [height, width]; raise UserError if it is no mask."""
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
        """Return the numbers that occur in the masks, in order."""
        with ThreadPoolExecutor(max(1, threads)) as pool:
            found = list(pool.map(lambda n: np.unique(self.read(n)), range(len(self.rows))))
        return np.unique(np.concatenate(found)).tolist()

    def patches(self, size: int, patches: int, threads: int) -> NDArray[np.uint8]:
        """Resize masks to `size` x `size` (nearest) and cut them: uint8 [images, patches, p]."""
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


def encode_patches(context: Context, index: Index, encoding: Encoding) -> Array:
    """Encode images to patch tokens after the final norm, float32 [images, N, D], on all ranks."""
    done = 0

    def read(images: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += len(images)
        context.report({"step": done, "steps": -(-index.n // context.world_size)})
        return encoding.output(images, "last").patch_tokens().float()

    size = encoding.settings.image_size
    share = encode_share(
        context, index, encoding.device, size, None, read, squeezed=True, batch=_AT_ONCE
    )
    return distributed.gather_rows(share)[: index.n].cpu().numpy()


def miou(
    truth: NDArray[np.uint8], predicted: NDArray[np.uint8], ignore: tuple[int, ...]
) -> tuple[float, dict[str, float], float]:
    """Compute the mean intersection over union of classes, over all pixels together.

    Pixels whose true number is ignored do not count. The mean is over the numbers that occur among
    the other pixels, true or predicted (as scikit-learn's and CAPI's).

    Args:
        truth: uint8, of any shape.

    Returns:
        mIoU, IoU of each number, and the accuracy of pixels, in percent.
    """
    return iou_from_counts(confusion_counts(truth, predicted, ignore), ignore)


def confusion_counts(
    truth: NDArray[np.uint8], predicted: NDArray[np.uint8], ignore: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return how many pixels that count have each true and predicted number, int64 [256 * 256]."""
    counted = ~np.isin(truth, ignore)
    pairs = truth[counted].astype(np.int64) * CLASSES + predicted[counted]
    return np.bincount(pairs, minlength=CLASSES**2)


def iou_from_counts(
    pairs: NDArray[np.int64], ignore: tuple[int, ...]
) -> tuple[float, dict[str, float], float]:
    """Compute `miou` from counts of pairs, int64 [256 * 256]."""
    if not pairs.any():
        raise UserError(f"all test masks hold only the numbers {[*ignore]}, which are ignored")
    table = pairs.reshape(CLASSES, CLASSES)
    both = table.diagonal()
    union = table.sum(axis=0) + table.sum(axis=1) - both
    present = np.flatnonzero(union)
    each = {str(number): float(100 * both[number] / union[number]) for number in present.tolist()}
    return float(np.mean([*each.values()])), each, float(100 * both.sum() / table.sum())
