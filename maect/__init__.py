"""MAE-CT: contrastive tuning of masked autoencoders, from raw images to the paper's tables.

import maect

encoder = maect.load("results/birds/runs/ct_min")
vectors = encoder.encode(["a.jpg", "b.png"])  # float32 [2, encoder.width]
images = maect.shards("results/birds/shards/birds/train")  # a torch Dataset
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # they import torch
    from maect.answers.encoder import ImageEncoder
    from maect.data.dataset import ShardDataset

__all__ = ["load", "shards"]
__version__ = "0.1.0"


def load(
    folder: str | PathLike[str],
    device: str | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    resize: int | None = None,
) -> "ImageEncoder":
    """Load a run's encoder with the preprocessing that belongs to it.

    Args:
        folder: of a run, such as `results/birds/runs/ct_min`, or one that `maect export` wrote; or
            the name of a public encoder, such as `dinov2_small` (`docs/weights.md`).
        device: such as "cpu" or "cuda:1"; none: a GPU where there is one.
        precision: of the forward pass; fp32 is that of the features files.
        resize: shorter side of images before the centre crop, if not the run's.

    Raises:
        maect.core.errors.UserError: there is no encoder, or it is damaged.
    """
    from maect.answers.encoder import ImageEncoder

    return ImageEncoder(Path(folder), device, precision, resize)


def shards(
    folder: str | PathLike[str],
    image: Literal["pil", "tensor"] = "pil",
    transform: Callable[[Any], Any] | None = None,
) -> "ShardDataset":
    """Open a split's shards as a map-style torch Dataset, for training code of one's own.

    It also gives a stock webdataset pipeline, files, and the order of a training.

    Args:
        folder: of a split, such as `results/birds/shards/birds/train`.
        image: Pillow images, or tensors uint8 [C, H, W].
        transform: called with each of them, such as one of torchvision's.

    Raises:
        maect.core.errors.UserError: no such shards, or one is missing or of another size.
    """
    from maect.data.dataset import ShardDataset

    return ShardDataset(folder, image, transform)
