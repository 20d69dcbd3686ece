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
from maect.stages import Pretrain, Stage, Tune
from maect.stages.flops import flops_per_image

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
STATES = 3  # two are kept and one is being written
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
    return embed + encoder.depth * block_flops(1 + encoder.patches, encoder.width)


def training_flops(stage: Stage, encoder: Encoder, images: int) -> float:
    """Operations of a whole training."""
    return flops_per_image(stage, encoder) * images * stage.epochs


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


def parameters(encoder: Encoder) -> int:
    """Weights of an encoder, near enough for its size on disk."""
    embed = 3 * encoder.patch_size**2 * encoder.width
    return embed + encoder.depth * (12 * encoder.width**2 + 13 * encoder.width)


def run_bytes(stage: Stage, encoder: Encoder) -> int:
    """What a training leaves: its states, encoder and head, in bytes.

    A state has fp32 weights and AdamW's two moments of all that learns; tuning adds its averages.
    """
    body = parameters(encoder)
    decoder = encoder.decoder_depth * 12 * encoder.decoder_width**2
    head = getattr(stage, "head", None)
    others = decoder if isinstance(stage, Pretrain) else 0
    if head is not None:
        hidden = head.projector_hidden
        others += hidden * (encoder.width + hidden + head.embedding)
        others += 2 * head.embedding * head.predictor_hidden + head.embedding * head.queue_size
    learns = body if isinstance(stage, Pretrain | Tune) else 0
    averages = 4 * body if isinstance(stage, Tune) else 0
    return STATES * (12 * (learns + others) + averages) + 4 * (body + others)


def feature_bytes(encoder: Encoder, images: int) -> int:
    """Float32 features and labels."""
    return images * (4 * encoder.width + 8)


def part_done(folder: Path) -> float:
    """The part of a training that its last report has behind it."""
    progress = read_mapping(folder / "progress.json")
    step, steps = progress.get("step"), progress.get("steps")
    return min(1.0, step / steps) if isinstance(step, int) and steps else 0.0
