"""A rank of our own, feature files, and shards of digits and of shapes with small encoders."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import FileStore, Store

from maect.core.context import Context
from maect.evaluate import EvaluationConfig
from maect.evaluate.base import EvaluationJob, Protocol
from maect.evaluate.store import write_features


class Rank(Context):
    """A rank told to stop after `patience` questions, alone or one of several processes."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, meeting: Path | None = None, cpus: int = 2,
        patience: int | None = None, current: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(cpus)
        self.rank = self.local_rank = rank
        self.world_size = self.local_world_size = world_size
        self.meeting, self.current, self.groups = meeting, current, 0
        self.patience = patience
        self.reports: list[dict[str, Any]] = []

    def stop_requested(self) -> bool:
        if self.patience is not None:
            self.patience -= 1
        return self.patience is not None and self.patience < 0

    def report(self, progress: dict[str, Any], /) -> None:
        self.reports.append(progress)

    def is_current(self) -> bool:
        return self.current

    def store(self, timeout: timedelta, /) -> Store:
        if self.meeting is None:
            return super().store(timeout)
        self.groups += 1
        return FileStore(f"{self.meeting}-{self.groups}", self.world_size)


def on_rank(place: Any, function: Callable[..., str], **arguments: Any) -> str:
    """Extract or evaluate on one of several ranks, as a job of `ranks.run`."""
    rank = Rank(place.rank, place.world_size, cpus=1, meeting=Path(place.meeting))
    return function(rank, **arguments)


@pytest.fixture
def rank() -> Rank:
    return Rank()


RECORD = {
    "run": "a_run", "encoder_sha256": "e" * 64, "index_digest": "d" * 64, "class_names": [],
    "pooling": "cls", "image_size": 16, "resize": 16, "precision": "fp32",
}  # fmt: skip


def store(path: Path, features: Any, labels: Any, keys: Any = None, **record: Any) -> Path:
    features = np.asarray(features, np.float32)
    write_features(
        path, [features[:3], features[3:]], width=features.shape[1],
        labels=np.asarray(labels, np.int64),
        keys=keys or [f"c/{i:04d}" for i in range(len(features))], record={**RECORD, **record},
    )  # fmt: skip
    return path


def blobs(n: int, width: int, classes: int, seed: int, spread: float = 1.0):
    """Overlapping classes: labels [n] and float32 features [n, width] around common centres."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width))
    labels = rng.integers(0, classes, n)
    return (centers[labels] + spread * rng.normal(size=(n, width))).astype(np.float32), labels


def features_job(folder: Path, train: Any, test: Any, **record: Any) -> EvaluationJob:
    """Of features and labels (and keys) of `train` and `test`."""
    inputs = {
        name: store(folder / f"{name}.safetensors", *values, **record)
        for name, values in (("train", train), ("test", test))
    }
    return EvaluationJob(folder / "run", folder / "out.json", inputs)


@pytest.fixture
def job(tmp_path: Path) -> EvaluationJob:
    """300 train and 90 test samples of 6 overlapping classes."""
    return features_job(tmp_path, blobs(300, 12, 6, 0), blobs(90, 12, 6, 1))


def given(job: EvaluationJob, **inputs: Path | None) -> EvaluationJob:
    """The job with other inputs; None takes one away."""
    every = {**job.inputs, **inputs}
    return replace(job, inputs={name: path for name, path in every.items() if path is not None})


def resolved(job: EvaluationJob, settings: Protocol) -> Path:
    """The resolved file of an evaluation, beside its result."""
    path = job.out.with_suffix(".yaml")
    EvaluationConfig(
        evaluation=job.out.stem, protocol=settings.name, run=job.run, resize=job.resize,
        inputs=dict(job.inputs), settings=settings,
    ).write(path)  # fmt: skip
    return path


def write_run(root: Path, **shape: Any) -> None:
    """Write `runs/mae` with a small untrained encoder, changed by `shape`."""
    from maect.models.vit import build_encoder, seeded
    from maect.models.weights import save_encoder
    from maect.recipes import Encoder

    small = {
        "image_size": 16, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "decoder_width": 8,
        "decoder_depth": 1, "decoder_heads": 1, "mae_pooling": "mean", "ct_pooling": "mean",
    }  # fmt: skip
    settings = Encoder.model_validate(small | shape)
    with seeded(0):
        encoder = build_encoder(settings)
    path = root / "runs" / "mae" / "encoder.safetensors"
    path.parent.mkdir(parents=True)
    save_encoder(path, encoder.state_dict(), settings, "mean")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards `train` (150) and `val` (70) of digits, and a run with a small untrained encoder."""
    from PIL import Image
    from sklearn.datasets import load_digits

    from maect.data.shards import shard
    from maect.recipes import Pixels

    root = tmp_path_factory.mktemp("images")
    digits = load_digits()
    for number in range(220):
        split = "train" if number < 150 else "val"
        path = root / "images" / split / str(digits.target[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = np.rint(digits.images[number] * (255 / 16)).astype(np.uint8)
        Image.fromarray(grey).convert("RGB").resize((16, 16)).save(path)
    for split in ("train", "val"):
        shard(root / "images" / split, root / "shards" / split, "folder", 2)
    # Not ImageNet's mean and deviation, so that whoever forgets them is found.
    write_run(root, pixels=Pixels(mean=(0.5, 0.3, 0.4), std=(0.3, 0.2, 0.25)))
    return root


@pytest.fixture(scope="session")
def extracted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Features of both splits by the encoder of that run."""
    from maect.evaluate.features import extract

    root, encoder = tmp_path_factory.mktemp("extracted"), images / "runs/mae/encoder.safetensors"
    out = {split: root / f"{split}.safetensors" for split in ("train", "val")}
    for split, path in out.items():
        shards = images / "shards" / split
        assert extract(Rank(), encoder=encoder, shards=shards, out=path, resize=16) == "done"
    return out


@pytest.fixture(scope="session")
def imagenet_val(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards `val` again, of images that are called as ImageNet's are."""
    from maect.data.shards import shard

    root = tmp_path_factory.mktemp("imagenet_val")
    for number, path in enumerate(sorted((images / "images" / "val").glob("*/*.png"))):
        copy = root / "images" / path.parent.name / f"ILSVRC2012_val_{number + 1:08d}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    shard(root / "images", root / "val", "folder", 2)
    return root / "val"


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 40 and 20 shapes with masks, and an encoder whose patch tokens keep colours."""
    from PIL import Image

    from maect.data.bundled import draw
    from maect.data.shards import shard

    root = tmp_path_factory.mktemp("shapes")
    for split, numbers in {"train": range(40), "val": range(40, 60)}.items():
        for folder, place in ((split, 0), (f"{split}_masks", 1)):
            (root / "images" / folder).mkdir(parents=True)
            for number in numbers:
                path = root / "images" / folder / f"{number:04d}.png"
                Image.fromarray(draw(number)[place]).save(path)
            kind = "masks" if place else "unlabelled"
            shard(root / "images" / folder, root / "shards" / folder, kind, 1)
    write_run(root, image_size=32, width=32, depth=2)
    return root


def masked_job(drawn: Path, out: Path) -> EvaluationJob:
    names = ("train", "test", "train_masks", "test_masks")
    inputs = {name: drawn / "shards" / name.replace("test", "val") for name in names}
    return EvaluationJob(drawn / "runs" / "mae", out, inputs)
