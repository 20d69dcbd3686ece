"""Copies of photographs, equal and changed, among others; and images sorted into folders."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_digits

from maect.answers import alike
from maect.answers.alike import NEAR, border, most_of, near_rows, random_pairs
from maect.answers.duplicates import perceptual_hash
from maect.cli import main

from .conftest import photograph

CHANGED = {
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "bright": lambda image: ImageEnhance.Brightness(image).enhance(1.25),
    "mirrored": ImageOps.mirror,
}


def scene(number: int) -> Image.Image:
    """Smooth random colours: no two are alike."""
    small = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((96, 80), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twice")
    for number in range(30):
        scene(number).save(root / f"{number:02d}.png")
    for number, (name, change) in enumerate(CHANGED.items()):
        change(scene(number)).save(root / f"{name}.jpg", quality=80)
    shutil.copy(root / "07.png", root / "copy.png")
    (root / "broken.png").write_bytes(b"\x89PNG")
    return root


def test_copies_come_first_and_what_cannot_be_read_is_named(folder, tmp_path, capsys):
    images = Path(shutil.copytree(folder, tmp_path / "images"))
    # Its name in what is captured of other tests would end xdist's worker.
    shutil.copy(images / "07.png", os.fsencode(images) + b"/k\xe4fer.png")
    assert main(["duplicates", str(images), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "1 pair of equal files, 3 pairs of near-duplicates, 0 links, 2 images" in told.out
    assert "broken.png: left out" in told.err and "its name is not UTF-8" in told.err
    pairs = json.loads((tmp_path / "pairs.json").read_text())
    equal, *near = pairs
    splits = {"split_a": "", "split_b": ""}
    found = {"a": "07.png", "b": "copy.png", "kind": "equal", "bits": 0, "similarity": None}
    assert equal == found | splits
    assert {(pair["a"], pair["b"], pair["kind"]) for pair in near} == {
        ("00.png", "half.jpg", "near"),
        ("01.png", "bright.jpg", "near"),
        ("02.png", "mirrored.jpg", "near"),
    }
    assert all(pair["bits"] <= NEAR for pair in near)
    assert pd.read_csv(tmp_path / "pairs.csv")["b"].tolist() == [pair["b"] for pair in pairs]
    assert (tmp_path / "index.html").read_text().count("data:image/jpeg;base64,/9j/") == 8


def test_links_are_named_and_are_no_copies(tmp_path, capsys):
    """Whoever deletes the second name of each pair must not lose the only file."""
    images = tmp_path / "images"
    (images / "z").mkdir(parents=True)
    for number in range(3):
        scene(number).save(images / f"z/{number}.png")
    (images / "a-link.png").symlink_to("z/0.png")
    os.link(images / "z/0.png", images / "b-hard.png")
    shutil.copy(images / "z/0.png", images / "copy.png")
    (images / "y").symlink_to("z")  # a folder, too
    shutil.copy(images / "z/0.png", images / "a-copy.png")  # before the file behind the link
    (images / "c-link.png").symlink_to("copy.png")  # which would break without it
    assert main(["duplicates", str(images), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2 pairs of equal files, 0 pairs of near-duplicates, 6 links, 0 images left" in said
    pairs = json.loads((tmp_path / "out/pairs.json").read_text())
    links = {(pair["a"], pair["b"], pair["kind"]) for pair in pairs if "link" in pair["kind"]}
    assert links == {
        ("b-hard.png", "a-link.png", "symbolic link"),
        ("copy.png", "c-link.png", "symbolic link"),
        ("b-hard.png", "y/0.png", "symbolic link"),
        ("b-hard.png", "z/0.png", "hard link"),
        ("z/1.png", "y/1.png", "symbolic link"),
        ("z/2.png", "y/2.png", "symbolic link"),
    }
    exact = [(pair["a"], pair["b"]) for pair in pairs if pair["kind"] == "equal"]
    assert exact == [("b-hard.png", "a-copy.png"), ("b-hard.png", "copy.png")]
    assert (tmp_path / "out/copies.txt").read_text() == "a-copy.png\n"
    page = (tmp_path / "out/index.html").read_text()
    assert "Never delete both files of a pair" in page
    assert "<code>copies.txt</code> (1 images)" in page


def test_the_border_comes_from_the_images(tmp_path):
    """Digits by different hands differ in few bits of their hashes, and are no duplicates."""
    images, out = tmp_path / "digits", tmp_path / "out"
    images.mkdir()
    for number, values in enumerate(load_digits().images[:300]):
        digit = Image.fromarray((values * 15.9).astype(np.uint8))
        digit.save(images / f"{number:03d}.png")
        if number < 5:
            ImageEnhance.Brightness(digit).enhance(0.95).save(images / f"dark-{number}.png")
    assert main(["duplicates", str(images), "--out", str(out)]) == 0
    pairs = json.loads((out / "pairs.json").read_text())
    planted = {(f"{number:03d}.png", f"dark-{number}.png") for number in range(5)}
    near = {(pair["a"], pair["b"]) for pair in pairs if pair["kind"] == "near"}
    assert planted <= near and len(near - planted) <= 8


def test_what_is_cut_is_said():
    rows = [(0, 1, 0.5), (0, 2, 0.9), (1, 2, 0.7), (0, 1, 0.8)]
    assert most_of(rows, 2) == ({(0, 2): 0.9, (0, 1): 0.8}, True)
    assert most_of(rows, 3) == ({(0, 2): 0.9, (0, 1): 0.8, (1, 2): 0.7}, False)


def test_more_images_than_are_compared_at_once(monkeypatch):
    """The same pairs, block by block; and random pairs where all would be too many."""
    monkeypatch.setattr(alike, "_ROWS", 4)
    monkeypatch.setattr(alike, "SAMPLED", 30)
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(11, 3)), rng.normal(size=(9, 3))
    for within, against in ((True, one), (False, other)):
        products = one @ against.T
        expected = {
            (i, j): pytest.approx(products[i, j])
            for i, j in np.argwhere(products >= 0.5).tolist()
            if i < j or not within
        }
        found = {(i, j): product for i, j, product in near_rows(one, against, 0.5, within)}
        assert found == expected
    i, j = random_pairs(12, 4)
    assert (i.max(), j.max()) == (11, 3)
    i, j = random_pairs(12)
    assert len(i) > 15 and (i != j).all()


@pytest.mark.parametrize("width", [2, 4, 16])
def test_the_border_is_where_one_pair_is_expected(width):
    points = np.random.default_rng(width).normal(size=(600, width))
    i, j = np.triu_indices(600, 1)
    distances = np.square(points[i] - points[j]).sum(1)
    found = border(distances, 600, len(distances))
    assert found is not None and (distances <= found).sum() <= 5
    # A copy of every tenth point does not move it.
    planted = np.concatenate([distances, np.full(60, 1e-9)])
    assert border(planted, 660, len(planted)) == pytest.approx(found, rel=0.35)
    assert border(np.zeros(100), 50, 100) is None and border(distances[:3], 3, 3) is None


def test_vectors_stand_beside_hashes(run, folder, tmp_path):
    index, out = tmp_path / "all.parquet", tmp_path / "pairs"
    assert main(["embed", str(run), str(folder), "--out", str(index)]) == 0
    assert main(["duplicates", str(index), "--out", str(out)]) == 0
    pairs = json.loads((out / "pairs.json").read_text())
    assert pairs[0]["kind"] == "equal" and pairs[0]["similarity"] == pytest.approx(1, abs=1e-5)
    assert {"half.jpg", "bright.jpg", "mirrored.jpg"} < {pair["b"] for pair in pairs}


def test_a_hash_is_of_what_is_seen():
    flat = [perceptual_hash(Image.new("RGB", (9, 9), color)) for color in ("red", "blue")]
    assert not np.any(flat)  # pictures of one colour are not alike for that
    one, other = perceptual_hash(scene(3)), perceptual_hash(scene(4))
    assert set(one.tolist()) == {-1.0, 1.0}
    assert one @ perceptual_hash(scene(3).resize((200, 160))) > 56 > one @ other + 20


def test_images_are_sorted_into_folders_and_stay(photographs, tmp_path, capsys):
    """By a table as a spreadsheet saves it."""
    names = sorted(str(p.relative_to(photographs)) for p in photographs.rglob("No*"))
    table = tmp_path / "clusters.csv"
    groups = {name: f"Käfer {i % 11}" if i else "" for i, name in enumerate(names)}
    lines = [f"{name},{group},0.5\r\n" for name, group in groups.items()]
    table.write_text("".join(["file,cluster,distance\r\n", *lines]), encoding="utf-8-sig")
    for link in (False, True):
        out = tmp_path / f"sorted{link}"
        assert main(["sort", str(table), str(photographs), str(out), *["--link"] * link]) == 0
        for name, group in groups.items():
            file = out / (group or "none") / name
            assert file.is_symlink() == link
            assert file.read_bytes() == (photographs / name).read_bytes()
    assert "sortedTrue/none" in capsys.readouterr().out
    assert main(["sort", str(table), str(photographs), str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("file,distance\na.png,1", "a column cluster or class"),
        ("file,class\n../a.png,x", "is not the name of a file below"),
        ("file,class\na.png,x/../../y", "cannot be the name of a folder"),
        ("file,class\na.png, ..", "' ..' cannot be the name of a folder"),
        ("file,class\na.png,none\nb.png,", "a group is called 'none'"),
        ("file,class\ngone.png,x", "no such file"),
        ("file;class\na.png;x", "commas between them"),
        ("class,file\nx", "'' is not the name of a file"),
        ("file,class\na.png,x\na.png,y", "has 'a.png' 2 times"),
        ("file,class\na.png,K\udce4fer", "save it as CSV UTF-8"),
    ],
)
def test_tables_that_cannot_be_sorted_by(text, fault, tmp_path, capsys):
    images, table, out = tmp_path / "images", tmp_path / "t.csv", tmp_path / "out"
    images.mkdir()
    photograph(0, 20, 20).save(images / "a.png")
    table.write_text(text, errors="surrogateescape")
    assert main(["sort", str(table), str(images), str(out)]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1
    assert not out.exists() or not os.listdir(out)
