"""MAE-CT: contrastive tuning of masked autoencoders, from raw images to the paper's tables.

import maect

encoder = maect.load("results/birds/runs/ct_min")
vectors = encoder.encode(["a.jpg", "b.png"])  # float32 [2, encoder.width]
images = maect.shards("results/birds/shards/birds/train")  # a torch Dataset
run = maect.run_training("results/birds/runs/mae/config.yaml")  # Path of its folder
metrics = maect.run_evaluation("results/birds/evaluations/ct_min/knn.yaml")  # {"knn": 93.1, ...}
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # they import torch
    from maect.answers.encoder import ImageEncoder
    from maect.data.dataset import ShardDataset

__all__ = ["load", "run_evaluation", "run_training", "shards"]
__version__ = "0.2.0"


def load(
    folder: str | PathLike[str],
    device: str | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    resize: int | None = None,
    pixels: Mapping[str, Any] | None = None,
) -> "ImageEncoder":
    """Load a run's encoder with the preprocessing that belongs to it.

    Args:
        folder: of a run, such as `results/birds/runs/ct_min`, or one that `maect export` wrote; or
            the name of a public encoder, such as `dinov2_small` (`docs/weights.md`).
        device: such as "cpu" or "cuda:1"; none: a GPU where there is one.
        precision: of the forward pass. Features files have fp32 too, or TF32 for encoders from
            width 768 on (GPUs only), unless an experiment says otherwise.
        resize: shorter side of images before the centre crop, if not the run's.
        pixels: how images are read, such as `{"range": [0, 4095]}` (`docs/data.md`): range,
            orientation and background, if not as viewers show them and the run's data set says.

    Raises:
        maect.core.errors.UserError: there is no encoder, or it is damaged.

    Examples:
        >>> encoder = maect.load("dinov2_small")
        >>> vectors = encoder.encode(["a.jpg", "b.png"])  # float32 [2, encoder.width]
    """
    from maect.answers.encoder import ImageEncoder

    return ImageEncoder(Path(folder), device, precision, resize, pixels)


def shards(
    folder: str | PathLike[str],
    image: Literal["pil", "tensor"] = "pil",
    transform: Callable[[Any], Any] | None = None,
) -> "ShardDataset":
    """Open a split's shards as a map-style torch Dataset, for training code of one's own.

    It also gives the order of a training.

    Args:
        folder: of a split, such as `results/birds/shards/birds/train`.
        image: Pillow images, or tensors uint8 [C, H, W].
        transform: called with each of them, such as one of torchvision's.

    Raises:
        maect.core.errors.UserError: no such shards, or one is missing or of another size.

    Examples:
        >>> images = maect.shards("results/birds/shards/birds/train", image="tensor")
        >>> images[0]["image"]  # uint8 [3, H, W]
    """
    from maect.data.dataset import ShardDataset

    return ShardDataset(folder, image, transform)


def run_training(
    config: str | PathLike[str],
    changes: Sequence[str] = (),
    out: str | PathLike[str] | None = None,
    **where: Any,
) -> Path:
    """Train a run, or resume it, and wait until it is finished; as the command `maect train`.

    Args:
        config: the resolved file of the run (`maect resolve EXPERIMENT` writes it).
        changes: `KEY=VALUE` in place of what it says, which makes another run.
        out: where to write the changed file; results go beside it.
        **where: options of the command that say where to run, such as `devices=2`.

    Returns:
        The run's folder, for `maect.load`.

    Raises:
        maect.core.errors.UserError: the input is wrong; names the file and gives a hint.

    Examples:
        >>> folder = maect.run_training("results/birds/runs/mae/config.yaml", devices=2)
        >>> encoder = maect.load(folder)
    """
    from maect.core.resources import Resources
    from maect.tools.train import train as command

    written = None if out is None else Path(out)
    command(Path(config), changes, out=written, resources=Resources.of(where))
    return (written or Path(config)).parent


def run_evaluation(
    config: str | PathLike[str],
    changes: Sequence[str] = (),
    out: str | PathLike[str] | None = None,
    **where: Any,
) -> dict[str, Any]:
    """Evaluate an encoder in one way; as the command `maect evaluate`.

    Args:
        config: the resolved file of the evaluation (`maect resolve EXPERIMENT` writes it).
        changes: `KEY=VALUE` in place of what it says, which makes another evaluation.
        out: where the resolved file of that is written; the result goes beside it, as JSON.
        **where: options of the command that say where to run, such as `devices=2`.

    Returns:
        The metrics.

    Raises:
        maect.core.errors.UserError: what cannot work, with the file and a hint.

    Examples:
        >>> maect.run_evaluation("results/birds/evaluations/ct_min/knn.yaml")["knn"]
        93.1
    """
    from maect.core.files import read_record
    from maect.core.resources import Resources
    from maect.tools.evaluate import evaluate as command

    written = None if out is None else Path(out)
    command(Path(config), changes, out=written, resources=Resources.of(where))
    metrics: dict[str, Any] = read_record((written or Path(config)).with_suffix(".json"))["metrics"]
    return metrics
