"""All of CIFAR-10 from its image folder, where it is at hand."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from maect.data.index import open_index
from maect.data.loader import train_batches
from maect.data.shards import shard
from maect.recipes import AUGMENTATIONS


@pytest.mark.slow
def test_cifar10(tmp_path: Path) -> None:
    archive = Path(os.environ.get("MAECT_TEST_DATA", "/nonexistent")) / "cifar10.tar.xz"
    if not archive.exists():
        pytest.skip("CIFAR-10; set MAECT_TEST_DATA to the folder that has cifar10.tar.xz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "images", filter="data")
    for split, images, count in (("train", "train", 50_000), ("val", "test", 10_000)):
        out = tmp_path / "shards" / split
        assert shard(tmp_path / "images" / images, out, "folder", 4, threads=2) == count
        index = open_index(out)
        assert np.bincount(index.labels).tolist() == [count // 10] * 10
        assert (index.rows[:, 5:7] == 32).all()
        stock = webdataset.WebDataset(str(index.shards[0]), shardshuffle=False)
        labels = [int(sample["cls"]) for sample in stock]
        assert labels == index.labels[: len(labels)].tolist()

    index = open_index(tmp_path / "shards/train")
    steps = -(-index.n // 1024)
    seen = np.zeros(index.n, int)
    for batch in train_batches(
        index, global_batch=1024, rank=0, world_size=1, seed=0, views=AUGMENTATIONS["min"],
        image_size=32, start_step=0, steps=steps, threads=2,
    ):  # fmt: skip
        np.add.at(seen, batch.ids[batch.epochs == 0], 1)
    assert (seen == 1).all()
