"""Part of CIFAR-10's images, for results that are made without training."""

import shutil
from pathlib import Path

COUNTS = {"train": 200, "val": 50}
"""Images of each class, by split."""


def copy_photos(cifar10: Path, out: Path) -> None:
    """Write SPLIT/CLASS/IMAGE.

    Args:
        cifar10: folder with train/CLASS/IMAGE and test/CLASS/IMAGE.
        out: folder of the splits.
    """
    for split, count in COUNTS.items():
        for folder in sorted((cifar10 / ("test" if split == "val" else split)).iterdir()):
            (out / split / folder.name).mkdir(parents=True)
            for image in sorted(folder.iterdir())[:count]:
                shutil.copy(image, out / split / folder.name / image.name)
