import io
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


def test_view_of_a_view(shards, tmp_path):
    class_view(shards, tmp_path / "a", ["c1", "c2"])
    class_view(tmp_path / "a", tmp_path / "deep/b", ["c2"])
    b = open_index(tmp_path / "deep/b")
    assert b.n == 8 and all(b.key(i).startswith("c2/") for i in range(8))
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
        (lambda s: balanced_rows(LABELS, 3, 0), "class 0: 2 samples, 3 wanted"),
        (lambda s: balanced_rows(LABELS, 1, 3, ["a", "b", "c"]), "class c: 0 samples, 1 wanted"),
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


def test_samples_without_label_are_in_no_subset():
    assert set(balanced_rows(LABELS, 2, 3)) == {0, 1, 3, 4}
    assert set(balanced_rows(LABELS, 2, 3, ["a", "b"])) == {0, 1, 3, 4}


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("a.jpg\nb.jpg\na.jpg\n", "repeat")])
def test_wrong_lists(text, message, tmp_path):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_list(tmp_path / "list.txt")


def test_a_list_may_name_what_a_tar_calls_otherwise(tmp_path):
    names = ["c/plain.png", "c/back\\slash.png", "c/1.2.png", f"c/{'long' * 30}.png"]
    for number, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (9 * number, 0, 0)).save(path)
    shard(tmp_path / "images", tmp_path / "out", "folder", 1)
    index = open_index(tmp_path / "out")
    found = [rows_by_name(index.keys(), [name], index.directory).tolist() for name in names]
    assert sorted(found) == [[0], [1], [2], [3]]
    assert index.keys()[found[1][0]] == "c/back_slash"


@pytest.mark.parametrize("names", [("1.jpg", "1.png"), ("a.b.jpg", "a_b.jpg")], ids="/".join)
def test_names_of_one_stem_are_told_apart(names, tmp_path):
    """In a tar one of them has a mark; a list means the one that it names, or is refused."""
    for number, name in enumerate(names):
        path = tmp_path / "images/cat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8 + number)).save(path)
    shard(tmp_path / "images", tmp_path / "out", "folder", 1)
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


def test_verify_passes_what_is_sound(shards, tmp_path):
    assert verify(shards, threads=2) == 24
    class_view(shards, tmp_path / "view", ["c1"])
    assert verify(tmp_path / "view") == 8


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 255
    path.write_bytes(data)


def break_image(copy: Path) -> list[str]:
    index = open_index(copy)
    row = index.rows[9].tolist()
    path = index.shards[row[1]]
    for offset in [row[2] + 1, *range(row[2] + row[3] // 2, row[2] + row[3] // 2 + 200)]:
        flip_byte(path, offset)
    return [f"{path.name}: checksum differs", index.keys()[9]]


def change_keys(copy: Path) -> list[str]:
    flip_byte(copy / "keys.txt", 3)
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
def test_verify_names_the_damage(damage, shards, tmp_path):
    copy = Path(shutil.copytree(shards, tmp_path / "copy"))
    expected = damage(copy)
    with pytest.raises(UserError) as fault:
        verify(copy)
    text = str(fault.value)
    assert all(part in text for part in expected) and "\n" not in text
