"""MAE-CT: contrastive tuning of masked autoencoders, from raw images to the paper's tables.

import maect

encoder = maect.load("results/birds/runs/ct_min")
vectors = encoder.encode(["a.jpg", "b.png"])  # float32 [2, encoder.width]
"""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it imports torch
    from maect.answers.encoder import ImageEncoder

__all__ = ["load"]
__version__ = "0.1.0"


def load(
    folder: str | PathLike[str],
    device: str | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    resize: int | None = None,
) -> "ImageEncoder":
    """Load a run's encoder with the preprocessing that belongs to it.

    Args:
        folder: of a run, such as `results/birds/runs/ct_min`, or one that `maect export` wrote.
        device: such as "cpu" or "cuda:1"; none: a GPU where there is one.
        precision: of the forward pass; fp32 is that of the features files.
        resize: shorter side of images before the centre crop, if not the run's.

    Raises:
        maect.core.errors.UserError: there is no encoder, or it is damaged.
    """
    from maect.answers.encoder import ImageEncoder

    return ImageEncoder(Path(folder), device, precision, resize)
