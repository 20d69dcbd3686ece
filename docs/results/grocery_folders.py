r"""Sorts the Grocery Store photographs into folders by class, as links.

    git clone https://github.com/marcusklasson/GroceryStoreDataset
    python docs/results/grocery_folders.py GroceryStoreDataset/dataset grocery

The spoilt encoder, of the file that `saliency_weights.py` writes, was then compared by

    maect import saliency_vit_small.safetensors spoilt \
        --timm vit_small_patch14_dinov2.lvd142m --image-size 98
    maect compare spoilt --images fine=grocery/fine coarse=grocery/coarse --blocks --geometry
    maect duplicates grocery/fine

It writes grocery/fine and grocery/coarse, each with train/CLASS and test/CLASS: 81 kinds and 43
groups of them. Its authors' lists say which photograph is of which class; their `val`, 296
photographs, is left out.
"""

import argparse
import csv
from pathlib import Path


def write_folders(dataset: Path, out: Path) -> None:
    """Link every photograph of the authors' train and test lists below `fine` and `coarse`."""
    with (dataset / "classes.csv").open(encoding="utf-8", newline="") as file:
        classes = list(csv.DictReader(file))
    fine = {line["Class ID (int)"]: line["Class Name (str)"] for line in classes}
    coarse = {line["Coarse Class ID (int)"]: line["Coarse Class Name (str)"] for line in classes}
    for split in ("train", "test"):
        for line in (dataset / f"{split}.txt").read_text(encoding="utf-8").splitlines():
            path, number, group = (part.strip() for part in line.split(","))
            image = (dataset / path).resolve(strict=True)
            for kind, label in (("fine", fine[number]), ("coarse", coarse[group])):
                link = out / kind / split / label / image.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(image)


def main() -> None:
    """Sort the photographs of a clone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write_folders(options.dataset, options.out)


if __name__ == "__main__":
    main()
