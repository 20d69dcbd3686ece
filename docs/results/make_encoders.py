"""Makes the matrix of encoders and folders in `encoders/`, without downloads of weights.

    maect run digits_law --cores 2; maect run cifar10_refined --cores 2; maect run shapes --cores 2
    python docs/results/make_encoders.py CIFAR10 results

CIFAR10 is the folder with train/CLASS/IMAGE and test/CLASS/IMAGE. RESULTS holds the experiments, of
which only the five runs in `ENCODERS` need to be finished. The sixth encoder is untrained, and the
seventh passes the pixels on: what is above it, an encoder has added.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from photos import copy_photos
from PIL import Image

from maect.data.bundled import CLASSES, SIDE, draw, write_digits
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import load_encoder

HERE = Path(__file__).parent / "encoders"
ENCODERS = {
    "digits-mae": "digits_law/runs/mae_tiny",
    "digits-mae-ct": "digits_law/runs/ct_aug_tiny",
    "cifar10-mae": "cifar10_refined/runs/mae_tiny8",
    "shapes-mae": "shapes/runs/mae_tiny",
    "shapes-mae-ct": "shapes/runs/ct_min_tiny",
}
FIRST_SHAPE, SHAPES = 1000, 4000  # drawings that no training has seen


def make_folders(work: Path, cifar10: Path) -> dict[str, Path]:
    """Five folders of images: CLASS/IMAGE, two of them below train/ and val/."""
    write_digits(work / "digits")
    for split in ("rotated", "noisy", "inverted"):
        (work / "digits" / split).rename(work / f"digits-{split}")
    copy_photos(cifar10, work / "cifar10")
    for number in range(FIRST_SHAPE, FIRST_SHAPE + SHAPES):
        drawing, mask = draw(number)
        kinds = np.unique(mask[mask > 1])
        if len(kinds) == 1:  # one class in the image
            out = work / "shapes" / CLASSES[kinds[0] - 1]
            out.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawing, "RGB").save(out / f"{number}.png")
    names = ("digits", "digits-rotated", "digits-noisy", "cifar10", "shapes")
    return {name: work / name for name in names}


def make_untrained(run: Path) -> Path:
    """A ViT of the digits' size for 32 pixels with random weights, seed 0."""
    settings = load_encoder("tiny", SIDE)
    with seeded(0):
        weights = build_encoder(settings).state_dict()
    run.mkdir(parents=True)
    save_encoder(run / "encoder.safetensors", weights, settings, "mean")
    return run


def make_pixels(run: Path) -> Path:
    """Make an encoder whose features are 16 x 16 pixels, at mean 0 and deviation 1 of each image.

    One patch covers the image, its embedding is the identity, and the only block adds nothing. The
    final norm is what shifts and scales.
    """
    side, width = 16, 3 * 16 * 16
    settings = load_encoder("tiny").model_copy(
        update={"image_size": side, "patch_size": side, "width": width, "depth": 1, "heads": 1}
    )
    weights = build_encoder(settings).state_dict()
    weights = {name: torch.zeros_like(value) for name, value in weights.items()}
    weights["patch_embed.proj.weight"] = torch.eye(width).view(width, 3, side, side)
    weights["norm.weight"] += 1
    run.mkdir(parents=True)
    save_encoder(run / "encoder.safetensors", weights, settings, "mean")
    return run


def main() -> None:
    """Make folders and encoders, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cifar10", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--work", type=Path, default=Path("encoders_on_folders"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    folders = make_folders(options.work / "images", options.cifar10)
    encoders = {name: options.results / run for name, run in ENCODERS.items()}
    encoders["untrained"] = make_untrained(options.work / "untrained")
    encoders["pixels"] = make_pixels(options.work / "pixels")
    subprocess.run(
        [
            Path(sys.executable).parent / "maect", "compare",
            *(f"{name}={path}" for name, path in encoders.items()),
            "--images", *(f"{name}={path}" for name, path in folders.items()),
            "--out", options.work / "compared",
        ],
        check=True,
    )  # fmt: skip
    for name in ("compare.csv", "compare.md"):
        shutil.copy(options.work / "compared" / name, HERE / name)


if __name__ == "__main__":
    main()
