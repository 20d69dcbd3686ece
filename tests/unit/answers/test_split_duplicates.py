"""Duplicates across splits, by bytes and by features."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from maect.answers.alike import Found, Pair
from maect.answers.duplicates import _excluded, open_splits, search_splits
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_json
from maect.data.config import CONFIG, ShardsConfig
from maect.data.index import open_index
from maect.data.shards import shard
from maect.evaluate.store import write_features
from maect.experiment.chosen_shards import note_taken
from maect.records import EvaluationRecord
from maect.report.pages import pairs_of

from .conftest import photograph


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits with an equal file, one that is nearly the same, and features of both."""
    root = tmp_path_factory.mktemp("results")
    images = {split: root / "images" / split for split in ("train", "val")}
    for split, numbers in (("train", range(12)), ("val", range(20, 26))):
        images[split].mkdir(parents=True)
        for number in numbers:
            photograph(number, 40, 30).save(images[split] / f"{number}.png")
    shutil.copy(images["train"] / "3.png", images["val"] / "copy.png")
    shutil.copy(images["train"] / "4.png", images["train"] / "again.png")
    with Image.open(images["train"] / "5.png") as image:
        image.save(images["val"] / "smaller.jpg", quality=60)
    return clustered(root, images, vector)


def vector(key: str) -> np.ndarray:
    """Random, but the same of what shows the same."""
    same = {"copy": 3, "again": 4, "smaller": 5}
    number = same.get(key) or int(key)
    noise = 0.01 * np.random.default_rng(99).normal(size=16) * (key == "smaller")
    return np.random.default_rng(number).normal(size=16) + 7 + noise


def search(results: Path, out: Path) -> Found:
    return search_splits(results / "runs/ct", out)[0]


def test_pairs_across_splits(results, tmp_path):
    found = search(results, tmp_path)
    across = found.pairs
    assert found.similarity == 0.95 and not found.cut
    assert [(p.a, p.b, p.split_a, p.split_b, p.kind) for p in across] == [
        ("3.png", "copy.png", "train", "val", "equal"),
        ("5.png", "smaller.jpg", "train", "val", "near"),
    ]
    assert across[0].similarity == 1 and 0.99 < across[1].similarity < 1
    # Every pair that is as alike is named.
    every = [split.features.values for split in open_splits(results / "runs/ct")]
    together = np.concatenate(every)
    unit = [(part - together.mean(0)) / together.std(0) for part in every]
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in unit]
    assert len(across) == int((unit[0] @ unit[1].T >= found.similarity).sum())


def test_of_two_splits_the_training_image_is_left_out():
    """Also where its split comes last; without one of this name the first's."""
    pairs = [
        Pair(*names, *splits, "equal", None, 1.0)
        for names, splits in (("ab", ("test", "train")), ("cd", ("one", "two")))
    ]
    left_out = _excluded(pairs)
    assert (left_out["train"], left_out["test"], left_out["one"]) == ({"b"}, set(), {"c"})


def test_the_command_writes_tables_and_a_page(results, capsys):
    assert main(["duplicates", str(results / "runs/ct")]) == 0
    out = results / "duplicates/ct"
    said = capsys.readouterr().out
    assert f"{out}: 1 pair of equal files, 1 pair of near-duplicates, 0 links" in said
    assert (out / "exclude-train.txt").read_text() == "3.png\n5.png\n"
    assert not (out / "exclude-val.txt").exists()
    assert (out / "pairs.csv").read_text().splitlines()[1] == "3.png,copy.png,train,val,equal,,1.0"
    page = (out / "index.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 4
    assert "<code>exclude-train.txt</code> (2 images)" in page


def test_a_report_shows_pairs_of_the_images_as_they_are_now(results, caplog):
    assert main(["duplicates", str(results / "runs/ct")]) == 0
    record, explored = results / "duplicates.json", results / "explore.safetensors"
    pairs = json.loads((results / "duplicates/ct/pairs.json").read_text())
    digests = {name: open_index(results / "shards/mine" / name).digest for name in ("train", "val")}
    assert read_record(record) == {"splits": digests, "pairs": pairs}
    assert not pairs_of(record, explored)  # of nobody knows what
    for seen, shown in (
        (digests, pairs),
        ({"val": digests["val"]}, pairs),  # the other split may not be shown
        (digests | {"val": "another"}, []),
    ):
        about = {f"features_{name}": {"index_digest": digest} for name, digest in seen.items()}
        result = EvaluationRecord(metrics={}, provenance={"splits": about})
        result.write(explored.with_suffix(".json"))
        assert pairs_of(record, explored) == shown
    assert "duplicates.json: not of the images as they are now" in caplog.text
    write_json(record, pairs)
    with pytest.raises(UserError, match=r"duplicates\.json: damaged \(it has no checksum\)"):
        pairs_of(record, explored)


def test_what_is_missing_is_said(results, tmp_path):
    shutil.copytree(results, tmp_path / "r")
    # Another experiment has sharded the same images.
    own = tmp_path / "r/shards/mine/train"
    shutil.move(own, tmp_path / "other/shards/theirs/train")
    theirs = tmp_path / "other/shards/theirs/train"
    ShardsConfig(images=Path("/birds")).write(theirs / CONFIG)
    note_taken(own, theirs)
    assert len(search(tmp_path / "r", tmp_path / "out").pairs) == 2
    shutil.rmtree(tmp_path / "r/shards/mine/val")
    with pytest.raises(UserError, match=r"two splits .* are needed, and there is train; maect"):
        open_splits(tmp_path / "r/runs/ct")


def test_a_picture_that_is_there_many_times_is_not_paired_with_all(tmp_path):
    """A thousand copies are no million pairs."""
    images = {name: tmp_path / "images" / name for name in ("train", "val")}
    for folder, copies in zip(images.values(), (12, 9), strict=True):
        folder.mkdir(parents=True)
        for number in range(copies):
            photograph(0, 40, 30).save(folder / f"{number:02d}.png")
    across = search(clustered(tmp_path, images, lambda _: np.ones(4)), tmp_path / "out").pairs
    assert len(across) == 12 + 9 - 1 and all(pair.kind == "equal" for pair in across)
    assert len({pair.a for pair in across}) == 12 and len({pair.b for pair in across}) == 9


def test_links_between_splits_are_named(tmp_path):
    """They are a leak, and no copies: the file behind them may be the only one."""
    images = {name: tmp_path / "images" / name for name in ("train", "val")}
    for folder in images.values():
        folder.mkdir(parents=True)
    for number in range(6):
        photograph(number, 40, 30).save(images["train"] / f"{number}.png")
    (images["val"] / "soft.png").symlink_to(images["train"] / "0.png")
    os.link(images["train"] / "1.png", images["val"] / "hard.png")
    shutil.copy(images["train"] / "2.png", images["val"] / "copy.png")
    rng = np.random.default_rng(0)
    made = clustered(tmp_path, images, lambda _: rng.normal(size=32))
    pairs = search(made, tmp_path / "out").pairs
    assert {(pair.a, pair.b, pair.kind) for pair in pairs if pair.kind != "near"} == {
        ("0.png", "soft.png", "symbolic link"),
        ("1.png", "hard.png", "hard link"),
        ("2.png", "copy.png", "equal"),
    }


def test_the_threshold_comes_from_the_images(tmp_path):
    """A tuned encoder puts a class close together: of its images many have a cosine of 0.95."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, 32))
    shapes = rng.normal(size=(10, 3, 32))
    images, planted = {}, {}
    for split, count in (("train", 200), ("val", 100)):
        images[split] = tmp_path / "images" / split
        images[split].mkdir(parents=True)
        for number in range(count):
            name = f"{split}{number}"
            file = images[split] / f"{name}.png"
            Image.new("L", (8, 8), number).save(file)
            file.write_bytes(file.read_bytes() + name.encode())
            inside = 0.2 * rng.normal(size=3) @ shapes[number % 10]
            planted[name] = centers[number % 10] + inside
    for number in range(4):
        planted[f"val{number}"] = planted[f"train{number}"] + 1e-4 * rng.normal(size=32)
    found = search(clustered(tmp_path, images, planted.__getitem__), tmp_path / "out")
    assert found.similarity is not None and found.similarity > 0.99
    pairs = {(pair.a, pair.b) for pair in found.pairs}
    wanted = {(f"train{number}.png", f"val{number}.png") for number in range(4)}
    assert wanted <= pairs and len(pairs - wanted) <= 4


def clustered(
    root: Path, images: dict[str, Path], vector: Callable[[str], NDArray[np.float64]]
) -> Path:
    """Results of splits of these images, and of each image the vector that its name has."""
    (root / "runs/ct").mkdir(parents=True)
    (root / "runs/ct/encoder.safetensors").write_bytes(b"an encoder")
    encoder = sha256_file(root / "runs/ct/encoder.safetensors")
    for split, folder in images.items():
        shards = root / "shards/mine" / split
        shard(folder, shards, "unlabelled", 1)
        index = open_index(shards)
        rows = np.array([vector(key) for key in index.keys()], np.float32)  # noqa: SIM118
        write_features(
            root / f"features/ct/mine-{split}.safetensors", [rows], width=rows.shape[1],
            labels=np.array(index.labels), keys=index.keys(),
            record={"index_digest": index.digest, "encoder_sha256": encoder, "class_names": []},
        )  # fmt: skip
    return root
