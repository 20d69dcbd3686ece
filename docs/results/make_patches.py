"""Measures what tuning does to the patches of digits and of CIFAR-10, without training encoders.

Patches are classified one by one (dense), and all patches of an image together (attentive probe).

    maect run digits_law --cores 2; maect run cifar10_refined --cores 2
    python docs/results/make_patches.py CIFAR10 results [--only digits]

CIFAR10 is the folder with train/CLASS/IMAGE and test/CLASS/IMAGE, which digits do not need. RESULTS
holds the experiments, of which only the runs in `ENCODERS` need to be finished. Of a digit, the ink
has the digit's class and all else is background; of a photograph of CIFAR-10, which has no masks,
every pixel has its class.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from photos import COUNTS, copy_photos
from PIL import Image

from maect.data.bundled import write_digits

HERE = Path(__file__).parent / "patches"
ENCODERS = {
    "digits": {
        "mae_tiny": "digits_law/runs/mae_tiny",
        "ct_min_tiny": "digits_law/runs/ct_min_tiny",
        "ct_aug_tiny": "digits_law/runs/ct_aug_tiny",
    },
    "cifar10": {
        "mae_tiny8": "cifar10_refined/runs/mae_tiny8",
        "ct_aug_tiny8": "cifar10_refined/runs/ct_aug_tiny8",
        "refine_tiny8": "cifar10_refined/runs/refine_tiny8",
    },
}
ENCODER = "encoder.safetensors"
FORMS = ("mean", "cls", "cls_mean")  # that linear probes read
INK = 64  # of 255 levels
EVALUATED = ["patch_knn", "patch_logistic", "patch_linear", "attentive_probe"]
SETTINGS = {
    "patch_logistic": {"max_iterations": 100},
    "attentive_probe": {"updates": 200, "warmup_updates": 20},
    "patch_linear": {"held_out": 0.1, "flip": 0.0},  # a mirrored digit is no digit
}


def make_images(name: str, out: Path, cifar10: Path) -> None:
    """Write SPLIT/CLASS/IMAGE and SPLIT_masks/CLASS/IMAGE of a data set."""
    if name == "digits":
        write_digits(out)
    else:
        copy_photos(cifar10, out)
    for split in COUNTS:
        for number, folder in enumerate(sorted((out / split).iterdir())):
            masks = out / f"{split}_masks" / folder.name
            masks.mkdir(parents=True)
            for file in folder.iterdir():
                grey = np.asarray(Image.open(file).convert("L"))
                ink = grey >= INK if name == "digits" else np.ones(grey.shape, bool)
                mask = np.where(ink, 2 + number, 1).astype(np.uint8)
                Image.fromarray(mask, "L").save(masks / f"{file.stem}.png")


def write_experiment(name: str, work: Path, results: Path) -> Path:
    """Write an experiment that imports the encoders and classifies their patches."""
    images = {
        split: {"images": str(work / "images" / name / split), "kind": kind}
        for part in COUNTS
        for split, kind in ((part, "folder"), (f"{part}_masks", "masks"))
    }
    size = "tiny" if name == "digits" else "tiny8"
    config = {
        "description": f"patches of {name}",
        "storage": str(work / "results" / name),
        "datasets": {name: {"splits": images}},
        "runs": {
            run: {"weights": str(results / path / ENCODER), "layout": "mae", "size": size}
            for run, path in ENCODERS[name].items()
        },
        "protocols": SETTINGS,
        "evaluate": [{"runs": [*ENCODERS[name]], "protocols": EVALUATED}],
        "tables": ["dense"],
    }  # fmt: skip
    path = work / f"patches_{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def copy_results(name: str, results: Path) -> None:
    """Copy the table of patches, and write what the attentive probes found, beside this file."""
    shutil.copy(results / "tables/dense.csv", HERE / f"{name}_dense.csv")
    with (HERE / f"{name}_attentive_probe.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        readings = ["attentive_probe", *(f"attentive_probe_{form}" for form in FORMS)]
        writer.writerow(["run", *readings])
        for run in ENCODERS[name]:
            path = results / "evaluations" / run / "attentive_probe.json"
            metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
            writer.writerow([run, *(f"{metrics[reading]:.1f}" for reading in readings)])


def main() -> None:
    """Make images and masks, evaluate, and copy the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cifar10", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--work", type=Path, default=Path("patches"))
    parser.add_argument("--only", nargs="+", choices=[*ENCODERS], default=[*ENCODERS])
    options = parser.parse_args()
    work = options.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    maect = Path(sys.executable).parent / "maect"
    for name in options.only:
        make_images(name, work / "images" / name, options.cifar10)
        experiment = write_experiment(name, work, options.results.absolute())
        subprocess.run([maect, "run", experiment, "--cores", "2"], check=True)
        copy_results(name, work / "results" / name)


if __name__ == "__main__":
    main()
