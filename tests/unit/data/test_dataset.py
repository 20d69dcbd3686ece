"""A split's shards in somebody's own training code: `maect.shards`."""

import pickle
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import maect
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.data.loader import train_batches
from maect.data.subsets import class_view
from maect.recipes import View

PAGE = Path(__file__).parents[3] / "docs/data.md"


def trained(index: Index, batch: int, **given: Any) -> list[list[int]]:
    """Ids of the batches of a training."""
    batches = train_batches(
        index, global_batch=batch, rank=0, world_size=1, start_step=0, threads=1,
        views=[View(crop_scale=(0.2, 1.0))], image_size=8, **given,
    )  # fmt: skip
    return [batch.ids.tolist() for batch in batches]


def ids_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_a_sample(images, shards):
    pictures, tensors = maect.shards(shards), maect.shards(str(shards), image="tensor")
    index = open_index(shards)
    assert len(pictures) == 24 and pictures.classes == ["c0", "c1", "c2"]
    for i, (sample, other) in enumerate(zip(pictures, tensors, strict=True)):
        with Image.open(images / f"{sample['key']}.jpg") as image:
            expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(np.asarray(sample["image"]), expected)
        assert np.array_equal(other["image"].numpy(), expected.transpose(2, 0, 1))
        assert (sample["id"], sample["key"]) == (i, index.keys()[i])
        assert sample["label"] == other["label"] == int(sample["key"][1])
    assert np.array_equal(pictures[-1]["image"], pictures[23]["image"])
    sized = maect.shards(shards, transform=lambda image: image.size)
    assert sized[5]["image"] == pictures[5]["image"].size
    with pytest.raises(UserError, match="image 'rgb': pil or tensor"):
        maect.shards(shards, image="rgb")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"no index\.json"):
        maect.shards(images)


def test_order_is_that_of_a_training(shards, monkeypatch):
    """On ranks, over the end of an epoch, from a step on, and in another process."""
    dataset = maect.shards(shards, image="tensor", transform=_corner)
    given: dict[str, Any] = {"seed": 7, "steps": 6}
    whole = trained(dataset.index, 10, **given)

    def loaded(workers: int = 0, **options: Any) -> list[list[int]]:
        loader = DataLoader(
            pickle.loads(pickle.dumps(dataset)),  # as spawned workers get it
            batch_sampler=dataset.batch_sampler(10, **given, **options),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        assert len(loader) == 6 - options.get("start_step", 0)
        return ids_of(loader)

    assert loaded() == whole
    assert loaded(workers=1, start_step=4) == whole[4:]
    assert sorted([*chain(*whole)][:24]) == list(range(24))
    parts = [loaded(rank=rank, world_size=2) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    assert loaded(rank=1, world_size=2, start_step=3) == parts[1][3:]
    with monkeypatch.context() as patch:
        patch.setattr("maect.data.dataset.rank_and_size", lambda: (1, 2))
        assert loaded() == parts[1]
    with pytest.raises(UserError, match="batch_size 10 is not a multiple of 3 ranks"):
        dataset.batch_sampler(10, **given, world_size=3)
    with pytest.raises(UserError, match="rank 2 of 2"):
        dataset.batch_sampler(10, **given, rank=2, world_size=2)


def _corner(image: torch.Tensor) -> torch.Tensor:
    return image[:, :8, :8]


def test_a_view(shards, tmp_path):
    class_view(shards, tmp_path / "view", ["c2", "c0"])
    dataset = maect.shards(tmp_path / "view")
    found = {sample["key"]: sample["label"] for sample in dataset}
    assert len(found) == 16
    assert all(label == ("c2", "c0").index(key[:2]) for key, label in found.items())
    ids = {sample["id"] for sample in dataset}
    sized = maect.shards(tmp_path / "view", transform=lambda image: 0)
    sampler = dataset.batch_sampler(16, seed=0, steps=1)
    (batch,) = ids_of(DataLoader(sized, batch_sampler=sampler))
    assert set(batch) == ids and max(ids) > 15
    assert trained(dataset.index, 16, seed=0, steps=1) == [batch]


def test_the_page_works_word_for_word(shards, tmp_path, monkeypatch):
    home = tmp_path / "results/birds/shards/birds"
    home.mkdir(parents=True)
    (home / "train").symlink_to(shards)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"^```python\n([^`]*)^```", text, re.M):
        exec(code, names)
    assert names["batch"]["image"].shape == (16, 3, 32, 32)
    assert names["batch"]["image"].dtype == torch.uint8
    assert names["sample"].keys() == {"image", "label", "key", "id"}
    assert names["image"].shape[0] == 3 and names["label"] == names["train"][0]["label"]
