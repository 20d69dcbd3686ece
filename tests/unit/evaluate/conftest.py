"""A rank of our own, feature files, and a few real digits as shards with a small encoder."""

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


def store(
    path: Path,
    features: Any,
    labels: Any,
    keys: list[str] | None = None,
    contents: Any = None,
    **record: Any,
):
    features = np.asarray(features, np.float32)
    write_features(
        path, [features[:3], features[3:]], width=features.shape[1],
        labels=np.asarray(labels, np.int64),
        keys=keys or [f"c/{i:04d}" for i in range(len(features))], record={**RECORD, **record},
        contents=contents,
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
