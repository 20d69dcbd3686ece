"""Small images from the array beside the shards: the bits of the tar, or a line and the tar."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import flip, jpeg, random_crop
from torch import Tensor

from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.data import loader, native, pixels
from maect.data.index import Index, open_index
from maect.data.loader import evaluation_parts, train_batches
from maect.data.shard_check import verify
from maect.data.shards import shard
from maect.data.staging import stage
from maect.data.subsets import class_view
from maect.recipes import AUGMENTATIONS

pytestmark = pytest.mark.skipif(native.library() is None, reason="the array needs the native way")

KINDS = (*({"subsampling": n} for n in range(3)), {"subsampling": 2, "progressive": True})


def write_images(folder: Path) -> Path:
    """Pieces of photographs up to 64 pixels: JPEGs of all kinds, grey, CMYK, PNGs, odd shapes."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(24):
        image = random_crop(rng, 1, 65)
        if number % 6 == 0:
            image = image.resize((2, 64) if number else (64, 2))
        mode = ("RGB", "RGB", "L", "CMYK")[number % 4]
        data = jpeg(image.convert(mode), 80, **KINDS[number // 4 % 4])
        (folder / f"{number:03d}.jpg").write_bytes(data)
        image.convert(("RGB", "P", "RGBA")[number % 3]).save(folder / f"{number:03d}-p.png")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tmp_path_factory.mktemp("small")
    for label in ("a", "b"):
        write_images(images / "train" / label)
    out = tmp_path_factory.mktemp("shards") / "train"
    shard(images / "train", out, "folder", 3)
    return out


@pytest.fixture()
def copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "train"))


def images_of(index: Index, size: int = 24) -> list[Tensor]:
    train = train_batches(
        index, global_batch=16, rank=0, world_size=1, seed=1, views=AUGMENTATIONS["aug"],
        image_size=size, start_step=2, steps=7, threads=2,
    )  # fmt: skip
    images = [batch.images[0] for batch in train]
    parts = [range(start, min(start + 7, index.n)) for start in range(0, index.n, 7)]
    evaluation = evaluation_parts(index, image_size=size, parts=parts, threads=2)
    return images + [batch for batch, _, _ in evaluation]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def from_tar(index: Index, monkeypatch: pytest.MonkeyPatch, **options: int) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(loader, "open_pixels", lambda index: None)
        return images_of(index, **options)


@pytest.mark.parametrize("size", [1, 24, 70])
def test_array_and_tar_give_the_same_bits(small, size, monkeypatch):
    index = open_index(small)
    assert np.load(small / "pixels.npy", mmap_mode="r").shape == (96, 64, 64, 3)
    assert same(images_of(index, size=size), from_tar(index, monkeypatch, size=size))


def test_training_reads_no_tar(small, monkeypatch):
    monkeypatch.setattr(Index, "render", lambda *_: pytest.fail("a tar was read"))
    batches = train_batches(
        open_index(small), global_batch=96, rank=0, world_size=1, seed=0,
        views=AUGMENTATIONS["min"], image_size=16, start_step=0, steps=2, threads=1,
    )  # fmt: skip
    assert len(list(batches)) == 2


def exchange(path: Path) -> None:
    record = path.with_suffix(".json")
    write_record(record, read_record(record) | {"source": "0"})


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: flip(path, 5000), "damaged"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "damaged"),
        (Path.unlink, "No such file or directory"),
        (exchange, "of other shards, or damaged"),
    ],
)
def test_unsound_array_is_a_line_and_the_tar(damage, fault, copy, monkeypatch, caplog):
    path, index = copy / "pixels.npy", open_index(copy)
    damage(path)
    with caplog.at_level(logging.WARNING):
        found = images_of(index)
    assert [r.getMessage() for r in caplog.records if "pixels.npy" in r.getMessage()] == [
        f"{path}: {fault}; images are decoded each time; delete it and run maect shard again"
    ]
    assert same(found, from_tar(index, monkeypatch))


def test_made_for_shards_that_have_none_and_nothing_else_changes(copy, small):
    for name in ("pixels.npy", "pixels.json"):
        (copy / name).unlink()
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()}
    source = Path(read_record(copy / "plan.json")["source"])
    shard(source, copy, "folder", 3)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (copy / "pixels.npy").read_bytes() == (small / "pixels.npy").read_bytes()


def test_verification_compares_every_image(copy):
    assert verify(copy) == 96
    array = np.load(copy / "pixels.npy", mmap_mode="r+")
    array[17, 0, 0, 0] ^= 1
    array.flush()
    with pytest.raises(UserError, match=r"pixels\.npy: missing or changed"):
        verify(copy)
    record = read_record(copy / "pixels.json")
    write_record(copy / "pixels.json", record | {"sha256": sha256_file(copy / "pixels.npy")})
    with pytest.raises(UserError, match=r"pixels\.npy: sample 17 \(.*\) differs from its tar"):
        verify(copy)


def test_a_view_and_a_staged_copy_use_it(copy, tmp_path, monkeypatch):
    class_view(copy, tmp_path / "view", ["b"])
    index = open_index(tmp_path / "view")
    expected = from_tar(index, monkeypatch)
    assert pixels.open_pixels(index) is not None
    assert same(images_of(index), expected)
    staged = open_index(stage(tmp_path / "view", str(tmp_path)))
    shutil.rmtree(copy)
    assert pixels.open_pixels(staged) is not None
    assert same(images_of(staged), expected)


def test_crops_outside_of_an_image_are_refused():
    images, out = np.zeros((2, 8, 8, 3), np.uint8), np.zeros((1, 1, 3, 4, 4), np.uint8)
    inside = np.array([[[0, 0, 6, 5, 4, 4, 0, 0]]], np.int32)

    def crop(number: int, width: int, height: int, geometry: np.ndarray) -> bool:
        sides = np.array([[width, height]])
        return native.crops(images, np.array([number]), sides, geometry, out)

    assert crop(1, 6, 5, inside)
    for x, y in ((1, 0), (0, 1), (-1, 0)):
        assert not crop(1, 6, 5, inside + np.array([x, y, 0, 0, 0, 0, 0, 0], np.int32))
    for number, width, height in ((2, 6, 5), (-1, 6, 5), (0, 9, 5), (0, 6, 9)):
        with pytest.raises(ValueError, match="no such images"):
            crop(number, width, height, inside)


def test_one_larger_image_leaves_all_in_the_tar(tmp_path):
    write_images(tmp_path / "train/a")
    Image.new("RGB", (65, 3)).save(tmp_path / "train/a/large.png")
    shard(tmp_path / "train", tmp_path / "out", "folder", 1)
    assert not (tmp_path / "out/pixels.npy").exists()
