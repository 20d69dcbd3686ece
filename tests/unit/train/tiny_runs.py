"""A tiny data set of noise images, and recipes that train on it in about a second."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from maect.data.shards import shard
from maect.recipes import Encoder
from maect.recipes.settings import separate
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Head, Tune

ENCODER = Encoder(
    image_size=16, patch_size=4, width=16, depth=4, heads=2, decoder_width=16, decoder_depth=1,
    decoder_heads=2, mae_pooling="mean", ct_pooling="mean",
)  # fmt: skip
HEAD = {
    "queue_size": 64, "projector_hidden": 16, "predictor_hidden": 16, "embedding": 8,
    "temperature": 0.15, "topk": 3, "projector_ema": 0.9, "head_lr": 1e-3,
    "head_weight_decay": 1e-5,
}  # fmt: skip
STAGE = {"batch_size": 16, "epochs": 4, "warmup_fraction": 0.2, "precision": "fp32"}
# Written out: the recipes of the package may change, what these tests compare may not.
RECIPES = {
    "mae": ("pretrain", Pretrain, {"augmentation": "mae", "base_lr": 1e-3, "weight_decay": 0.05}),
    "head": ("head", Head, {"head": {"topk": 1, "projector_ema": 0.0}}),
    "ct": ("tune", Tune, {
        "base_lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.65, "frozen_blocks": 2,
        "encoder_ema": 0.99, "head": {},
    }),
}  # fmt: skip


def noise_shards(root: Path, images: int) -> Path:
    """Shards of smooth noise in four classes, 20 by 18 pixels."""
    random = np.random.default_rng(0)
    for number in range(images):
        file = root / "images" / str(number % 4) / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((20, 18), Image.Resampling.BICUBIC).save(file)
    shard(root / "images", root / "shards", "folder", 2)
    return root / "shards"


def job_maker(root, shards):
    """Arguments of `train` for a run of a name: 40 images, batches of 16, 2.5 steps an epoch.

    `source` is a run's name, or the folder of a run that lies elsewhere.
    """

    def make(name, recipe, source=None, folder=root / "runs", **changes):
        kind, _, augmentation = recipe.partition("_")
        stage, model, values = RECIPES[kind]
        values = STAGE | values | ({"augmentation": augmentation} if augmentation else {})
        if "head" in values or "head" in changes:
            head = HEAD | values.get("head", {}) | changes.pop("head", {})
            values = values | {"head": head}
        changes, how = separate(changes)
        settings = model.model_validate(values | changes)
        return {
            "folder": str(folder / name), "shards": str(shards), "stage": stage,
            "settings": settings.model_dump(mode="json"), "computing": how,
            "encoder": ENCODER.model_dump(mode="json"), "seed": 1,
            "source": None if source is None else str(folder / source),
        }  # fmt: skip

    return make


def metrics(folder) -> list[dict]:
    """Logged values without the timing."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return [{k: v for k, v in value.items() if k != "timing"} for value in values]


def losses(folder) -> list[float]:
    return [value["loss"] for value in metrics(folder)]
