"""How much there is to compute: images and operations of each job, bytes of what it leaves."""

from dataclasses import dataclass
from pathlib import Path

from maect.core.files import read_mapping
from maect.launch import record
from maect.launch.progress import part
from maect.recipes import Encoder

# Numbers of images of data sets whose shards are not there yet, from their publications.
KNOWN_IMAGES = {
    "imagenet": {
        "train": 1_281_167,
        "val": 50_000,
        "imagenet_v2_threshold": 10_000,
        "imagenet_v2_matched": 10_000,
        "imagenet_v2_top": 10_000,
        "imagenet_r": 30_000,
        "imagenet_sketch": 50_889,
        "imagenet_a": 7_500,
    },
    "cifar10": {"train": 50_000, "val": 10_000},
    "digits": {"train": 1_297, "val": 500},
}
# Bytes of the archives ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.
KNOWN_BYTES = {"imagenet": {"train": 147_897_477_120, "val": 6_744_924_160}}


@dataclass(frozen=True)
class Shards:
    """What is known of a split: a whole index, a plan, a publication, or nothing (None)."""

    images: int | None
    bytes: int | None
    written: bool
    classes: int = 1000
    """ImageNet's, where they are not known."""


def shards(folder: Path) -> Shards:
    """Look at `shards/DATASET/SPLIT`."""
    index, plan = read_mapping(folder / "index.json"), read_mapping(folder / "plan.json")
    if index:
        size = sum(shard["size"] for shard in index.get("shards", []))
        return Shards(index["n"], size, True, len(index.get("class_names", [])) or 1000)
    dataset, split = folder.parent.name, folder.name
    images = plan.get("n") or KNOWN_IMAGES.get(dataset, {}).get(split)
    return Shards(images, KNOWN_BYTES.get(dataset, {}).get(split), False)


def feature_bytes(encoder: Encoder, images: int) -> int:
    """Float32 features and labels."""
    return images * (4 * encoder.width + 8)


def part_done(folder: Path) -> float:
    """The part of a training that its last report has behind it."""
    return min(1.0, part(record.progress(folder, record.read_job(folder))) or 0.0)
