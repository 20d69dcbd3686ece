"""How much there is to compute: images and operations of each job, bytes of what it leaves."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from maect.core.files import read_mapping
from maect.evaluate.protocols import (
    ColorHistogram,
    EffectiveInvariance,
    FineTune,
    LinearProbe,
    Protocol,
)
from maect.recipes import Encoder
from maect.recipes.flops import block_flops

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
MINUTES = {"umap": 10.0, "clustering": 30.0, "low_shot": 20.0, "knn": 10.0}  # assumed
OTHER_MINUTES = 10.0


@dataclass(frozen=True)
class Shards:
    """What is known of a split: a whole index, a plan, a publication, or nothing (None)."""

    images: int | None
    bytes: int | None
    written: bool


def shards(folder: Path) -> Shards:
    """Look at `shards/DATASET/SPLIT`."""
    index, plan = read_mapping(folder / "index.json"), read_mapping(folder / "plan.json")
    if index:
        return Shards(index["n"], sum(shard["size"] for shard in index.get("shards", [])), True)
    dataset, split = folder.parent.name, folder.name
    images = plan.get("n") or KNOWN_IMAGES.get(dataset, {}).get(split)
    return Shards(images, KNOWN_BYTES.get(dataset, {}).get(split), False)


def encode_flops(encoder: Encoder) -> float:
    """Operations of encoding one whole image."""
    embed = 2 * encoder.patches * 3 * encoder.patch_size**2 * encoder.width
    tokens = encoder.prefix_tokens + encoder.patches
    return embed + encoder.depth * block_flops(tokens, encoder.width)


def evaluation_flops(
    options: Namespace, settings: Protocol | None, encoder: Encoder
) -> float | None:
    """Operations on the devices of a feature extraction or evaluation; None: it runs no encoder.

    Raises:
        KeyError: the number of images is not known.
    """

    def images(folder: Path) -> int:
        count = shards(folder).images
        if count is None:
            raise KeyError(f"{folder.parent.name} {folder.name}")
        return count

    one = encode_flops(encoder)
    if settings is None:
        return one * images(options.shards)
    test = one * images(options.test_shards) if options.test_shards else 0.0
    if isinstance(settings, LinearProbe | ColorHistogram):
        return one * images(options.train_shards) * settings.epochs + test
    if isinstance(settings, FineTune):
        if settings.shots:  # so many labels a class, each several times
            record = read_mapping(options.train_shards / "index.json")
            classes = len(record.get("class_names", [])) or 1000
            labels: float = settings.splits * sum(settings.shots) * classes
            return 3 * one * labels * settings.epochs + test
        labels = settings.fraction * images(options.train_shards)
        return settings.seeds * (3 * one * labels * settings.epochs + test)
    if options.protocol == "robustness":
        return sum(one * images(Path(part.partition("=")[2])) for part in options.split)
    if isinstance(settings, EffectiveInvariance):
        return test * (4 + settings.draws)  # as it is, and turned three times
    return None


def feature_bytes(encoder: Encoder, images: int) -> int:
    """Float32 features and labels."""
    return images * (4 * encoder.width + 8)


def part_done(folder: Path) -> float:
    """The part of a training that its last report has behind it."""
    progress = read_mapping(folder / "progress.json")
    step, steps = progress.get("step"), progress.get("steps")
    return min(1.0, step / steps) if isinstance(step, int) and steps else 0.0
