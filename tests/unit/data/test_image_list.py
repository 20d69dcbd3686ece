"""The source `list`: a table gives the shards that a folder would."""

import pytest
from sample_images import image_folder

from maect.cli import main
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.sources.image_files import ImageList


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_a_table_gives_what_its_folder_would(ending, separator, tmp_path):
    images = image_folder(tmp_path / "images", 2, 3)
    names = sorted(str(path.relative_to(tmp_path)) for path in images.rglob("*.jpg"))
    rows = [["label", "width", "path"], *([name.split("/")[1], "9", name] for name in names)]
    table = tmp_path / f"mine.{ending}"
    table.write_text("".join(separator.join(row) + "\r\n" for row in rows), encoding="utf-8-sig")
    out = tmp_path / "out"
    assert main(["shard", str(table), str(out), "--kind", "list", "--shards", "2"]) == 0
    index = open_index(out)
    assert index.class_names == ("c0", "c1") and index.n == 6
    for i, key in enumerate(index.keys()):
        assert index.read(i) == (tmp_path / f"{key}.jpg").read_bytes()
        assert index.labels[i] == int(key.split("/")[1][1:])


def test_classes_that_are_called_otherwise_are_indexed_again(tmp_path):
    images, out = image_folder(tmp_path / "images", 2, 3), tmp_path / "out"
    names = sorted(str(path.relative_to(tmp_path)) for path in images.rglob("*.jpg"))
    for classes in (("cat", "dog"), ("benign", "malignant")):  # in the same order
        rows = [f"{name},{classes[int(name.split('/')[1][1:])]}\n" for name in names]
        (tmp_path / "mine.csv").write_text("path,label\n" + "".join(rows))
        assert main(["shard", str(tmp_path / "mine.csv"), str(out), "--kind", "list"]) == 0
        assert open_index(out).class_names == classes


def test_a_table_without_labels(tmp_path):
    (tmp_path / "mine.csv").write_text("path\na.jpg\nb/c.jpg\n")
    listing = ImageList(tmp_path / "mine.csv").listing()
    assert [(entry.name, entry.label) for entry in listing.entries] == [
        ("a.jpg", -1), ("b/c.jpg", -1),
    ]  # fmt: skip
    assert listing.class_names == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"image,label\na.jpg,x\n", "mine.csv: the first line names no column `path`"),
        (b"", "the first line names no column `path`"),
        (b"path,label\na.jpg,x\nb.jpg\n", r"mine\.csv:3: no label"),
        (b"path,label\n,x\n", r"mine\.csv:2: no path"),
        (b"path\n../a.jpg\n", r"mine\.csv:2: '../a\.jpg' is not below the table's folder"),
        (b"path\n/etc/a.jpg\n", r"mine\.csv:2: '/etc/a\.jpg' is not below the table's folder"),
        (b"path\na.jpg\nb.jpg\na.jpg\n", "holds 'a.jpg' 2 times"),
        (b"path\n", "no images found"),
        (b"path\ncaf\xe9.jpg\n", "not a table in UTF-8"),
        (b'path\n"a.jpg\n', "not a table in UTF-8"),
    ],
)
def test_wrong_tables_are_refused(text, message, tmp_path):
    (tmp_path / "mine.csv").write_bytes(text)
    with pytest.raises(UserError, match=message) as fault:
        ImageList(tmp_path / "mine.csv").listing()
    assert "\n" not in str(fault.value)
