"""What every kind of source is asked for, and what no source may hand on."""

import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_images import image_folder, tar_of, write_all
from test_imagenet import picture

from maect.cli import main
from maect.core.errors import UserError
from maect.data.bundled import SHIFTS, write_digits
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources import open_source
from maect.data.sources.image_files import ImageList


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", [".", "..", "../b"])
def test_a_link_to_a_folder_that_it_lies_in_is_refused(target, tmp_path):
    write_all(tmp_path / "images", dict.fromkeys(("a/x.jpg", "b/x.jpg"), picture(1)))
    (tmp_path / "images/a/more").symlink_to(target)
    if target == "../b":  # the same folder twice, side by side, is a choice
        listing = open_source("folder", tmp_path / "images").listing()
        assert [e.name for e in listing.entries] == ["a/x.jpg", "a/more/x.jpg", "b/x.jpg"]
        return
    with pytest.raises(UserError, match=r"a/more: a link to a folder that it lies in"):
        shard(tmp_path / "images", tmp_path / "out", "folder", 1)


def test_class_folders_have_names_in_utf8(tmp_path):
    write_all(tmp_path, {os.fsdecode(b"caf\xe9/a.jpg"): picture(1)})
    with pytest.raises(UserError, match=r"class folder 'caf\\udce9': its name is not UTF-8"):
        shard(tmp_path, tmp_path / "out", "folder", 1)


def refused_tar(content: bytes, message: str, folder: Path) -> None:
    """Shard a tar of ImageNet's validation images that is refused in a line."""
    (folder / "val.tar").write_bytes(content)
    (folder / "val.txt").write_text("a.JPEG 3\nb.JPEG 3\n")
    with pytest.raises(UserError, match=rf"^\S+val\.tar: {message}") as fault:
        shard(folder / "val.tar", folder / "out", "imagenet_val", 1, labels=folder / "val.txt")
    assert "\n" not in str(fault.value)


def test_members_that_repeat_are_refused(tmp_path):
    tar = tar_of((name, picture(1)) for name in ("a.JPEG", "b.JPEG", "a.JPEG"))
    refused_tar(tar, r"holds 'a\.JPEG' 2 times", tmp_path)


@pytest.mark.timeout(60)
def test_a_tar_that_was_cut_between_two_images_is_refused(tmp_path):
    """Until it gets an end, as the message says."""
    cut = len(tar_of([("a.JPEG", picture(1))]).rstrip(b"\0"))
    images = tar_of((name, picture(1)) for name in ("a.JPEG", "b.JPEG"))[: -(-cut // 512) * 512]
    refused_tar(images, r"not a complete tar \(no blocks of zeros.*truncate -s \+1024", tmp_path)
    (tmp_path / "val.tar").write_bytes(images + bytes(1024))
    labels = tmp_path / "val.txt"
    assert shard(tmp_path / "val.tar", tmp_path / "out", "imagenet_val", 1, labels=labels) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(b"\xff" * 10 + b"\xfe\x00", id="back to its own header"),
        pytest.param(b"\x80" + b"\x7f" * 11, id="beyond 2^63"),
        pytest.param(b"00000100000\0", id="beyond the end"),
    ],
)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
def test_tars_with_impossible_sizes_end(size, kind, tmp_path):
    header = bytearray(tarfile.TarInfo("a.JPEG").tobuf(tarfile.GNU_FORMAT))
    header[124:136], header[148:157] = size, b" " * 8 + kind
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    good = tarfile.TarInfo("b.JPEG").tobuf(tarfile.GNU_FORMAT)
    refused_tar(good + bytes(header) + bytes(1024), "not a complete tar", tmp_path)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t"), ("TSV", "\t")])
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
        (tmp_path / "mine.csv").write_text("path, label\n" + "".join(rows))
        assert main(["shard", str(tmp_path / "mine.csv"), str(out), "--kind", "list"]) == 0
        assert open_index(out).class_names == classes


def test_a_table_without_labels(tmp_path):
    (tmp_path / "mine.csv").write_text("path\na.jpg\nb/c.jpg\n")
    listing = ImageList(tmp_path / "mine.csv").listing()
    assert [(e.name, e.label) for e in listing.entries] == [("a.jpg", -1), ("b/c.jpg", -1)]
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
        (b"path\na.jpg\n./a.jpg\n", "holds 'a.jpg' 2 times"),
        (b"path,label\na.jpg,tiger, cat\n", r"mine\.csv:2: more values than the header"),
        (b"path,Label\na.jpg,x\n", r"mine\.csv: has a column 'Label'; call it label"),
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


def read(folder: Path) -> dict[str, np.ndarray]:
    paths = sorted(folder.rglob("*.png"))
    return {str(p.relative_to(folder)): np.asarray(Image.open(p)).astype(int) for p in paths}


def test_digits_are_complete_and_shifted_ones_are_those_of_validation_changed(tmp_path):
    write_digits(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    write_digits(tmp_path)  # kept as they are
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"train", "val", *SHIFTS}
    plain, train = read(tmp_path / "val"), read(tmp_path / "train")
    assert len(plain) == 500 and len(train) == 1297 and not set(plain) & set(train)
    assert Counter(name[0] for name in plain) == dict.fromkeys("0123456789", 50)
    assert {digit.shape for digit in plain.values()} == {(16, 16, 3)}
    shifted = {name: read(tmp_path / name) for name in SHIFTS}
    assert all(set(images) == set(plain) for images in shifted.values())
    assert all(np.array_equal(shifted["inverted"][n], 255 - plain[n]) for n in plain)
    noise = np.stack([shifted["noisy"][name] - plain[name] for name in plain])
    inside = np.stack([(x > 64) & (x < 191) for x in plain.values()])
    assert np.abs(noise).max() == 64 and abs(noise[inside].mean()) < 1
    assert 36 < noise[inside].std() < 38  # 128 / sqrt(12)
    assert len(np.unique(noise[:20], axis=0)) == 20
    for name, turned in shifted["rotated"].items():
        upright = Image.fromarray(plain[name].astype(np.uint8))
        assert np.array_equal(turned, upright.rotate(30, Image.Resampling.BICUBIC))
