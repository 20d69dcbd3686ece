import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_images import encode, flip, write_all

from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.data.index import open_index
from maect.data.shard_check import verify
from maect.data.shards import shard
from maect.data.sources.base import read_list
from maect.data.subsets import balanced_rows, class_view, rows_by_name


def test_class_view_copies_nothing(shards, tmp_path):
    whole = open_index(shards)
    assert class_view(shards, tmp_path / "view", ["c2", "c0"]) == 16
    view = open_index(tmp_path / "view")
    assert view.class_names == ("c2", "c0")
    assert not list((tmp_path / "view").glob("*.tar"))
    wanted = np.flatnonzero(whole.labels != 1)
    assert (view.rows[:, 0] == wanted).all()  # ids stay those of the whole
    for i, row in enumerate(wanted):
        assert view.read(i) == whole.read(row) and view.key(i) == whole.key(row)
        assert view.labels[i] == {2: 0, 0: 1}[int(whole.labels[row])]
    assert view.keys() == [whole.keys()[row] for row in wanted]
    assert view.digest != whole.digest
    assert verify(shards, threads=2) == 24 and verify(tmp_path / "view") == 16
    class_view(tmp_path / "view", tmp_path / "deep/b", ["c0"])
    b = open_index(tmp_path / "deep/b")
    assert b.n == 8 and all(b.key(i).startswith("c0/") for i in range(8))
    assert b.labels.tolist() == [0] * 8


def test_rows_by_name(index):
    keys = index.keys()
    names = [keys[row] + ".JPEG" for row in (3, 17, 5)]
    assert rows_by_name(keys, names, index.directory).tolist() == [3, 5, 17]
    names = ["train/a/0.jpg", "b/1.png"]  # more folders than the keys have
    assert rows_by_name(["a/0", "1"], names, index.directory).tolist() == [0, 1]


LABELS = np.array([0, 0, -1, 1, 1, -1])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda s: class_view(s, s / "view", ["c0", "cat"]), "no class 'cat'"),
        (lambda s: rows_by_name(["a/0"], ["c9/0.jpg"], s), r"lacks 1 listed images, c9/0\.jpg"),
        (lambda s: rows_by_name(["a/0", "b/0"], ["0.jpg"], s), "names 2 images; give the folder"),
        (lambda s: rows_by_name(["a/0"], ["a/0.jpg", "0.jpg"], s), "1 images are listed twice"),
        (lambda s: balanced_rows(np.full(5, -1), 1, 0), "needs labels"),
    ],
)  # fmt: skip
def test_refusals(refused, message, shards):
    with pytest.raises(UserError, match=message):
        refused(shards)


@pytest.mark.parametrize("per_class", [1, 2, 5])
def test_balanced_subsets(index, per_class):
    rows = balanced_rows(index.labels, per_class, 0)
    assert Counter(index.labels[rows].tolist()) == {0: per_class, 1: per_class, 2: per_class}
    assert (np.diff(rows) > 0).all()
    assert rows.tolist() == balanced_rows(index.labels, per_class, 0).tolist()
    assert set(rows) <= set(balanced_rows(index.labels, per_class + 1, 0))
    assert any(rows.tolist() != balanced_rows(index.labels, per_class, s).tolist() for s in (1, 2))
    for names in ([], ["a", "b"]):  # what has no label is in no subset
        assert set(balanced_rows(LABELS, 2, 3, names)) == {0, 1, 3, 4}


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("a.jpg\nb.jpg\na.jpg\n", "repeat")])
def test_wrong_lists(text, message, tmp_path):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_list(tmp_path / "list.txt")


@pytest.mark.parametrize("names", [("1.jpg", "1.png"), ("a.b.jpg", "a_b.jpg")], ids="/".join)
def test_names_of_one_stem_are_told_apart(names, tmp_path):
    """In a tar one of them has a mark; a list means the one that it names, or is refused."""
    pictures = [encode(Image.new("RGB", (8, 8 + number)), "PNG") for number in range(2)]
    images = {f"cat/{name}": data for name, data in zip(names, pictures, strict=True)}
    shard(write_all(tmp_path / "images", images), tmp_path / "out", "folder", 1)
    index = open_index(tmp_path / "out")
    sizes = []
    for name in names:
        (row,) = rows_by_name(index.keys(), [f"cat/{name}"], index.directory)
        sizes.append(Image.open(io.BytesIO(index.read(row))).size[1])
    assert sizes == [8, 9]
    for name in (names[1], f"cat/{names[1].rpartition('.')[0]}"):
        with pytest.raises(UserError, match="may be one of several images; give its folder and"):
            rows_by_name(index.keys(), [name], index.directory)


def test_a_name_that_only_looks_marked_is_no_twin(tmp_path):
    """Thirteen characters behind a name, as a mark has, and none."""
    keys = ["c/shot", "c/shot_val_00000001", "c/shot-of-a-tree-0"]
    assert rows_by_name(keys, ["shot.jpg"], tmp_path).tolist() == [0]


def break_image(copy: Path) -> list[str]:
    index = open_index(copy)
    _, number, offset, *_ = index.rows[9].tolist()
    flip(index.shards[number], offset + 1)
    return [f"{index.shards[number].name}: checksum differs", index.keys()[9]]


def change_keys(copy: Path) -> list[str]:
    flip(copy / "keys.txt", 3)
    return ["keys.txt: missing or changed"]


def move_image_and_miscount(copy: Path) -> list[str]:
    rows = np.load(copy / "index.npy")
    rows[3, 2] += 512  # the offset of sample 3
    np.save(copy / "index.npy", rows)
    record = read_record(copy / "index.json")
    record["index_sha256"] = sha256_file(copy / "index.npy")
    record["shards"][1]["count"] += 1
    write_record(copy / "index.json", record)
    return [
        "train-000001.tar: 8 images, 9 recorded",
        f"train-000000.tar: no image at byte {rows[3, 2]} (sample 3)",
    ]


@pytest.mark.parametrize("damage", [break_image, change_keys, move_image_and_miscount])
def test_verify_names_the_damage(damage, copy):
    expected = damage(copy)
    with pytest.raises(UserError) as fault:
        verify(copy)
    assert all(part in str(fault.value) for part in expected)
