"""A split's shards in somebody's own training code: `maect.shards`."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import deep_png, jpeg, photographs
from torch.utils.data import DataLoader

import maect
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.loader import train_batches
from maect.data.shards import shard
from maect.data.subsets import class_view
from maect.recipes import Pixels, View

PAGE = Path(__file__).parents[3] / "docs/data.md"
SIDE = 40


def photograph() -> Image.Image:
    return photographs()[0].crop((200, 100, 200 + SIDE, 100 + SIDE))


def ids_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def broken(shards: Path, tmp_path: Path, offset: int) -> Path:
    """A copy of a split, one byte of whose second tar is another."""
    copy = tmp_path / "broken"
    copy.mkdir()
    for path in shards.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    tar = copy / "train-000001.tar"
    data = bytearray(tar.read_bytes())
    data[offset] ^= 1
    tar.write_bytes(data)
    return copy


def test_a_sample(images: Path, shards: Path) -> None:
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


def odd_images(folder: Path, pixels: Pixels) -> Path:
    """Square pictures in a class, of the formats that such pixels admit."""
    (folder / "c").mkdir(parents=True)
    image, exif = photograph(), Image.Exif()
    if pixels.channels == 5:
        values = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 5), np.uint8)
        np.save(folder / "c/bands.npy", values)
        (folder / "own.csv").write_text("path,label\nc/bands.npy,c\n")
        return folder / "own.csv"
    image.save(folder / "c/a.png")
    image.save(folder / "c/b.tiff")
    image.convert("L").save(folder / "c/c.png")
    exif[0x0112] = 6
    (folder / "c/d.jpg").write_bytes(jpeg(image, exif=exif.tobytes()))
    if pixels.range:
        (folder / "c/e.png").write_bytes(deep_png(np.asarray(image).astype(np.uint16) * 16))
    return folder


@pytest.mark.parametrize(
    "pixels",
    [
        Pixels(),
        Pixels(orientation="exif", range=(0, 4095)),
        Pixels(channels=1, mean=(0.5,), std=(0.5,)),
        Pixels(channels=5, mean=(0.5,) * 5, std=(0.5,) * 5),
    ],
)
def test_images_are_those_that_training_crops(pixels: Pixels, tmp_path: Path) -> None:
    source = odd_images(tmp_path / "in", pixels)
    shard(source, tmp_path / "out", "list" if source.is_file() else "folder", 1, pixels=pixels)
    dataset = maect.shards(tmp_path / "out", image="tensor")
    whole = np.array([[0, 0, SIDE, SIDE, SIDE, SIDE, 0, 0]], np.int32)
    for i, sample in enumerate(dataset):
        seen = np.empty((1, pixels.channels, SIDE, SIDE), np.uint8)
        dataset.index.render(i, whole, seen)
        # The portable decoder's tolerance.
        assert np.abs(sample["image"].numpy().astype(int) - seen[0]).max() <= 2
    if pixels.channels == 5:
        with pytest.raises(UserError, match=r'5 channels .*image="tensor"'):
            maect.shards(tmp_path / "out")
        array = np.load(next(source.parent.rglob("*.npy")))
        assert np.array_equal(array.transpose(2, 0, 1), dataset[0]["image"])
        return
    modes = {sample["image"].mode for sample in maect.shards(tmp_path / "out")}
    assert modes == {"L" if pixels.channels == 1 else "RGB"}


@pytest.mark.parametrize("workers", [0, 1])
def test_order_is_that_of_a_training(shards: Path, workers: int) -> None:
    """On ranks, over the end of an epoch, and from a step on."""
    dataset = maect.shards(shards, image="tensor", transform=lambda image: image[:, :8, :8])
    if workers:  # other processes get it by pickle
        dataset = maect.shards(shards, image="tensor", transform=_corner)
    given: dict[str, Any] = {"seed": 7, "steps": 6}
    trained = train_batches(
        dataset.index, global_batch=10, rank=0, world_size=1, start_step=0, threads=1,
        views=[View(crop_scale=(0.2, 1.0))], image_size=8, **given,
    )  # fmt: skip
    whole = [batch.ids.tolist() for batch in trained]

    def loaded(**options: Any) -> list[list[int]]:
        sampler = dataset.batch_sampler(10, **given, **options)
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
        )
        assert len(loader) == 6 - options.get("start_step", 0)
        return ids_of(loader)

    if workers:
        assert loaded(start_step=4) == whole[4:]
        return
    assert loaded() == whole
    flat = list(chain(*whole))
    assert sorted(flat[:24]) == list(range(24))
    parts = [loaded(rank=rank, world_size=2) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    assert loaded(rank=1, world_size=2, start_step=3) == parts[1][3:]
    assert dataset.order(7, 0).tolist() + dataset.order(7, 1).tolist()[:12] == flat[:36]
    with pytest.raises(UserError, match="batch_size 10 is not a multiple of 3 ranks"):
        dataset.batch_sampler(10, **given, world_size=3)
    with pytest.raises(UserError, match="rank 2 of 2"):
        dataset.batch_sampler(10, **given, rank=2, world_size=2)


def _corner(image: torch.Tensor) -> torch.Tensor:
    return image[:, :8, :8]


RANK = """
import sys, torch.distributed as dist, maect
rank, meeting, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
print(list(maect.shards(folder).batch_sampler(4, seed=1, steps=6)))
"""


def test_ranks_are_those_of_torch_distributed(shards: Path, tmp_path: Path) -> None:
    words = [str(tmp_path / "meeting"), str(shards)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *words], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    a, b = (eval(rank.communicate(timeout=300)[0]) for rank in ranks)
    whole = list(maect.shards(shards).batch_sampler(4, seed=1, steps=6))
    assert [first + second for first, second in zip(a, b, strict=True)] == whole
    assert sorted(chain(*whole)) == list(range(24))


def test_a_view(shards: Path, tmp_path: Path) -> None:
    class_view(shards, tmp_path / "view", ["c2", "c0"])
    dataset = maect.shards(tmp_path / "view")
    found = {sample["key"]: sample["label"] for sample in dataset}
    assert len(found) == 16
    assert all(label == ("c2", "c0").index(key[:2]) for key, label in found.items())
    ids = {sample["id"] for sample in dataset}
    (batch,) = ids_of(DataLoader(
        maect.shards(tmp_path / "view", transform=lambda image: 0),
        batch_sampler=dataset.batch_sampler(16, seed=0, steps=1),
    ))  # fmt: skip
    assert set(batch) == ids and max(ids) > 15


def test_unlabelled(images: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(images.rglob("*.jpg"))[:4]):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / f"in/{number}.jpg").write_bytes(path.read_bytes())
    shard(tmp_path / "in", tmp_path / "out", "unlabelled", 2)
    dataset = maect.shards(tmp_path / "out")
    assert [sample["label"] for sample in dataset] == [-1] * 4 and dataset.classes == []


def test_a_damaged_tar_is_named(shards: Path, tmp_path: Path) -> None:
    index = open_index(shards)
    row = index.rows[np.flatnonzero(index.rows[:, 1] == 1)[3]]
    inside = maect.shards(broken(shards, tmp_path, int(row[2] + row[3] // 2)))
    said = rf"train-000001\.tar: sample {row[0]} \({index.key(int(row[0]))}\) is damaged"
    with pytest.raises(UserError, match=said):
        list(inside)
    tar = tmp_path / "broken/train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(UserError, match=r"train-000001\.tar: \d+ bytes, \d+ recorded"):
        maect.shards(tmp_path / "broken")


def test_nothing_is_imported_before_it_is_called() -> None:
    code = "import sys, maect; maect.shards, maect.load\n"
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_works_word_for_word(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
