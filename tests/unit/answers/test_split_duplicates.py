"""Duplicates across splits, by bytes and by features."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maect.answers.alike import Pair, SearchedImages, find_pairs
from maect.answers.duplicates import _excluded, open_splits, search_splits
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file
from maect.data.config import CONFIG, ShardsConfig
from maect.data.index import open_index
from maect.data.shards import shard
from maect.evaluate.clustering import comparable, scale_of
from maect.evaluate.store import write_features
from maect.experiment.chosen_shards import note_taken
from maect.records import EvaluationRecord, RunRecord
from maect.report.pages import pairs_of

from .conftest import photograph


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits with an equal file, links, and one nearly the same, and features of both."""
    root = tmp_path_factory.mktemp("results")
    file = root / "runs/ct/encoder.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"an encoder")
    images = {split: root / "images" / split for split in ("train", "val")}
    for split, numbers in (("train", range(12)), ("val", range(20, 26))):
        images[split].mkdir(parents=True)
        for number in numbers:
            photograph(number, 40, 30).save(images[split] / f"{number}.png")
    shutil.copy(images["train"] / "3.png", images["val"] / "copy.png")
    shutil.copy(images["train"] / "4.png", images["train"] / "again.png")
    with Image.open(images["train"] / "5.png") as image:
        image.save(images["val"] / "smaller.jpg", quality=60)
    (images["val"] / "soft.png").symlink_to(images["train"] / "0.png")
    os.link(images["train"] / "1.png", images["val"] / "hard.png")
    for split, folder in images.items():
        shards = root / "shards/mine" / split
        shard(folder, shards, "unlabelled", 1)
        index = open_index(shards)
        rows = np.array([vector(key) for key in index.keys()], np.float32)  # noqa: SIM118
        about = {"encoder_sha256": sha256_file(file), "class_names": []}
        write_features(
            root / f"features/ct/mine-{split}.safetensors", [rows], width=rows.shape[1],
            labels=np.array(index.labels), keys=index.keys(),
            record=about | {"index_digest": index.digest},
        )  # fmt: skip
    return root


def vector(key: str) -> np.ndarray:
    """Random, but the same of what shows the same."""
    same = {"copy": "3", "again": "4", "smaller": "5", "soft": "0", "hard": "1"}
    number = int(same.get(key, key))
    noise = 0.01 * np.random.default_rng(99).normal(size=16) * (key == "smaller")
    return np.random.default_rng(number).normal(size=16) + 7 + noise


def test_pairs_across_splits(results, tmp_path):
    """Links are a leak, and no copies: the file behind them may be the only one."""
    found = search_splits(results / "runs/ct", tmp_path)[0]
    across = found.pairs
    assert found.similarity == 0.95 and not found.cut
    assert {(p.a, p.b, p.split_a, p.split_b, p.kind) for p in across} == {
        ("3.png", "copy.png", "train", "val", "equal"),
        ("5.png", "smaller.jpg", "train", "val", "near"),
        ("0.png", "soft.png", "train", "val", "symbolic link"),
        ("1.png", "hard.png", "train", "val", "hard link"),
    }
    similarity = {pair.a: pair.similarity for pair in across}
    assert similarity["3.png"] == 1 and 0.99 < similarity["5.png"] < 1
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


def test_the_command_writes_tables_and_pages(results, capsys, caplog):
    assert main(["duplicates", str(results / "runs/ct")]) == 0
    out = results / "duplicates/ct"
    said = capsys.readouterr().out
    assert f"{out}: 1 pair of equal files, 1 pair of near-duplicates, 2 links" in said
    assert (out / "exclude-train.txt").read_text() == "0.png\n1.png\n3.png\n5.png\n"
    assert not (out / "exclude-val.txt").exists()
    assert "3.png,copy.png,train,val,equal,,1.0\n" in (out / "pairs.csv").read_text()
    page = (out / "index.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8
    assert "<code>exclude-train.txt</code> (4 images)" in page
    # The report shows them, if they are of the images and the encoder as they are now.
    record, explored = results / "duplicates.json", results / "explore.safetensors"
    pairs = json.loads((results / "duplicates/ct/pairs.json").read_text())
    digests = {name: open_index(results / "shards/mine" / name).digest for name in ("train", "val")}
    own = sha256_file(results / "runs/ct/encoder.safetensors")
    made = {"run": "ct", "encoder_sha256": own, "splits": digests, "pairs": pairs}
    assert read_record(record) == made
    assert not pairs_of(record, explored)[1]  # of nobody knows what
    pairs.sort(key=lambda pair: -pair["similarity"])
    for seen, encoder, shown in (
        (digests, own, ("ct", pairs)),
        ({"val": digests["val"]}, own, ("ct", pairs)),  # the other split may not be shown
        (digests | {"val": "another"}, own, ("", [])),
        (digests, "another", ("", [])),
    ):
        told = RunRecord(run="ct", stage="tune", sha256={"encoder.safetensors": encoder})
        told.write(RunRecord.path(results / "runs/ct"))
        about = {f"features_{name}": {"index_digest": digest} for name, digest in seen.items()}
        result = EvaluationRecord(metrics={}, provenance={"splits": about})
        result.write(explored.with_suffix(".json"))
        assert pairs_of(record, explored) == shown
    RunRecord.path(results / "runs/ct").unlink()
    assert "duplicates.json: not of the images and the encoder as they are now" in caplog.text


def test_what_is_missing_is_said(results, tmp_path):
    shutil.copytree(results, tmp_path / "r")
    # Another experiment has sharded the same images.
    own = tmp_path / "r/shards/mine/train"
    shutil.move(own, tmp_path / "other/shards/theirs/train")
    theirs = tmp_path / "other/shards/theirs/train"
    ShardsConfig(images=Path("/birds")).write(theirs / CONFIG)
    note_taken(own, theirs)
    assert len(search_splits(tmp_path / "r/runs/ct", tmp_path / "out")[0].pairs) == 4
    shutil.rmtree(tmp_path / "r/shards/mine/val")
    with pytest.raises(UserError, match=r"two splits .* are needed, and there is train; maect"):
        open_splits(tmp_path / "r/runs/ct")


def searched(train: int, val: int, values: np.ndarray, digest: bytes | None) -> SearchedImages:
    """Images of two splits, named by their positions, with these vectors."""
    n, splits = train + val, ["train"] * train + ["val"] * val
    vectors = comparable(values.astype(np.float32), scale_of(values.astype(np.float32)))
    return SearchedImages([str(i) for i in range(n)], [digest] * n, splits, {}, vectors=vectors)


def test_a_picture_that_is_there_many_times_is_not_paired_with_all():
    """A thousand copies are no million pairs."""
    across = find_pairs(searched(12, 9, np.ones((21, 4)), b"all alike")).pairs
    assert len(across) == 12 + 9 - 1 and all(pair.kind == "equal" for pair in across)
    assert len({pair.a for pair in across}) == 12 and len({pair.b for pair in across}) == 9


def test_the_threshold_comes_from_the_images():
    """A tuned encoder puts a class close together: of its images many have a cosine of 0.95."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, 32))
    shapes = rng.normal(size=(10, 3, 32))
    inside = [0.2 * rng.normal(size=3) @ shapes[number % 10] for number in range(300)]
    values = np.tile(centers, (30, 1)) + inside
    values[200:204] = values[:4] + 1e-4 * rng.normal(size=(4, 32))
    found = find_pairs(searched(200, 100, values, None))
    assert found.similarity is not None and found.similarity > 0.99
    pairs = {(pair.a, pair.b) for pair in found.pairs}
    wanted = {(str(number), str(200 + number)) for number in range(4)}
    assert wanted <= pairs and len(pairs - wanted) <= 4
