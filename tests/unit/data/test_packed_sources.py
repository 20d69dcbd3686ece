"""Images in archives, webdatasets and tables: what their folder would give, from where they lie."""

import gzip
import json
import shutil
import subprocess
import tarfile
import zipfile
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from sample_images import image_folder, tar_of, write_all

from maect.core.errors import UserError
from maect.data.changes import advice, changes
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources import kind_of, open_source


def pack(images: Path, path: Path, *below: str) -> Path:
    """A zip or tar of a folder's images, `below` in turn before their names."""
    files = sorted(images.rglob("*.jpg"))
    starts = cycle(below or [""])
    named = [(next(starts) + str(file.relative_to(images)), file.read_bytes()) for file in files]
    if path.suffix == ".tar":
        path.write_bytes(tar_of(named))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (*named, ("__MACOSX/c0/._x.jpg", b""), ("notes.txt", b"")):
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("a.zip", [""]), ("a.zip", ["birds/all/"]), ("a.zip", ["", "./"]),
        ("a.tar", ["x/"]), ("a.tar", ["", "./"]),
    ],
)  # fmt: skip
def test_an_archive_gives_what_its_folder_would(name, below, images, index, tmp_path):
    archive = pack(images, tmp_path / name, *below)
    assert kind_of(archive) == "archive"
    shard(archive, tmp_path / "train", "archive", 2, threads=2)
    made = open_index(tmp_path / "train")
    assert made.digest == index.digest
    if name == "a.zip":
        assert made.record["ignored"]["suffixes"] == {".txt": 1}


def test_an_archive_without_folders_has_no_classes(images, tmp_path):
    listing = open_source("archive", pack(images / "c0", tmp_path / "a.zip", "all/")).listing()
    assert listing.class_names == [] and {e.label for e in listing.entries} == {-1}


@pytest.mark.parametrize(
    ("below", "stray"), [("", "birds/x.jpg"), ("", "x.jpg"), ("all", "birds/x.jpg")]
)
def test_a_stray_image_does_not_take_the_classes_away(
    below, stray, images, index, tmp_path, caplog
):
    """A contact sheet beside the class folders made all images unlabelled, and nothing said so."""
    shutil.copytree(images, tmp_path / "images/birds" / below)
    shutil.copy(images / "c0/000.jpg", tmp_path / "images" / stray)
    archive = pack(tmp_path / "images", tmp_path / "a.zip")
    shard(archive, tmp_path / "train", "archive", 2, threads=2)
    assert open_index(tmp_path / "train").digest == index.digest
    assert "a.zip: left out: 1 image in no class folder" in caplog.text


def link() -> bytes:
    """As GNU tar writes the second name of a file."""
    header = tarfile.TarInfo("c1/0.jpg")
    header.type, header.linkname = tarfile.LNKTYPE, "c0/0.jpg"
    return header.tobuf() + bytes(1024)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.tar", link(), "c1/0.jpg is a link; make the tar with"),
        ("a.tar.gz", gzip.compress(tar_of([("c/0.jpg", b"any")])), "cannot be .* a compressed tar"),
        ("a.zip", b"<html>", "neither a zip nor a tar"),
    ],
    ids=["link", "compressed", "no archive"],
)
def test_archives_that_cannot_be_read_are_refused(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name}: .*{message}"):
        open_source("archive", tmp_path / name).listing()


def test_a_webdataset_gives_what_its_folder_would(shards, index, tmp_path):
    (tmp_path / "names.txt").write_text("c0\nc1\nc2\n")
    folder = write_all(tmp_path / "tars", {p.name: p.read_bytes() for p in shards.glob("*.tar")})
    assert kind_of(folder) == kind_of(folder / "train-*.tar") == "webdataset"
    shard(folder, tmp_path / "train", "webdataset", 2, labels=tmp_path / "names.txt")
    made = open_index(tmp_path / "train")
    assert made.class_names == ("c0", "c1", "c2")
    images = {key: (index.read(i), int(index.labels[i])) for i, key in enumerate(index.keys())}
    assert images == {key: (made.read(i), int(made.labels[i])) for i, key in enumerate(made.keys())}


def test_samples_of_a_webdataset(tmp_path):
    """Names that recur in each tar, classes by name, and samples without image."""
    beside = [("0.json", b"{}"), ("1.json", b"{}"), ("0.mask.png", b"no image of its own")]
    for number, label in enumerate((b"owl", b"tit")):
        tar = tar_of([("0.jpg", b"any"), ("0.cls", label), *beside])
        (tmp_path / f"x-{number}.tar").write_bytes(tar)
    listing = open_source("webdataset", tmp_path / "x-*.tar").listing()
    assert [(e.name, e.label) for e in listing.entries] == [("x-0/0.jpg", 0), ("x-1/0.jpg", 1)]
    assert listing.class_names == ["owl", "tit"]
    assert listing.ignored_suffixes == {".json": 2, ".png": 2}


@pytest.mark.parametrize(
    ("labels", "classes", "found"),
    [
        (["-1", ""], None, [-1, -1]),  # both are no class
        (["10", "2"], None, [10, 2]),
        (["0", "1"], ["zebra", "apple"], [0, 1]),
        (["-1", "2"], None, r"x\.tar: 1 of 2 samples have no class"),
        (["apple", "zebra"], ["zebra", "apple"], r"classes\.txt: names classes, but the samples"),
    ],
)
def test_classes_of_a_webdataset(labels, classes, found, tmp_path):
    """A list of their names is for numbers alone."""
    samples = []
    for number, label in enumerate(labels):
        samples += [(f"{number}.jpg", b"any"), (f"{number}.cls", label.encode())]
    (tmp_path / "x.tar").write_bytes(tar_of(samples))
    (tmp_path / "classes.txt").write_text("\n".join(classes or []))
    given = tmp_path / "classes.txt" if classes else None
    source = open_source("webdataset", tmp_path / "x.tar", given)
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            source.listing()
        return
    listing = source.listing()
    assert [entry.label for entry in listing.entries] == found
    assert classes is None or listing.class_names == classes


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["k.depth.png", "k.jpg", "k.cls"], "k.jpg"),
        (["._k.jpg", "k.rgb.jpg", "k.fine.cls"], "k.rgb.jpg"),
        (["k.fine.cls", "k.jpg", "k.cls"], "k.jpg"),
        (["a.b/k.depth.png", "a.b/k.PNG"], "a.b/k.PNG"),
        (["k.depth.png", "k.rgb.jpg"], r"'k' has several images \(k.depth.png, k.rgb.jpg\); make"),
        (["k.png", "k.jpg"], "'k' has several images"),
        (["k.jpg", "k.fine.cls", "k.coarse.cls"], "'k' has several classes"),
        (["k.jpg", "k.cls", "l.jpg", "l.cls", "k.jpg"], r"holds 'k.jpg' twice; make it"),
    ],
)
def test_one_image_and_one_class_of_a_sample(names, found, tmp_path):
    """Sorted, a depth map comes before the photograph."""
    tar = tar_of((name, b"%d" % number) for number, name in enumerate(names))
    (tmp_path / "x.tar").write_bytes(tar)
    source = open_source("webdataset", tmp_path / "x.tar")
    if found not in names:
        with pytest.raises(UserError, match=rf"x\.tar: .*{found}"):
            source.listing()
        return
    listing = source.listing()
    (entry,) = listing.entries
    assert (entry.name, source.read(entry)) == (found, b"%d" % names.index(found))
    if "k.cls" in names:
        assert entry.label == names.index("k.cls")


def table(images: Path, labels: list[object], paths: bool = True) -> pa.Table:
    files = sorted(images.rglob("*.jpg"))
    names = [str(file.relative_to(images)) if paths else None for file in files]
    rows = [{"bytes": f.read_bytes(), "path": p} for f, p in zip(files, names, strict=True)]
    return pa.table({"id": range(len(files)), "image": rows, "label": labels})


def test_tables_of_hugging_face(images, index, tmp_path):
    made = with_names(table(images, [i // 8 for i in range(24)]), ["c0", "c1", "c2"])
    for number in range(2):
        part = made.slice(12 * number, 12)
        parquet.write_table(part, tmp_path / f"train-{number}.parquet", row_group_size=5)
    (tmp_path / "val-0.parquet").write_bytes(b"")
    assert kind_of(tmp_path / "train-*.parquet") == kind_of(tmp_path) == "parquet"
    source = open_source("parquet", tmp_path / "train-*.parquet")
    entries = source.listing().entries
    assert source.read(entries[17]) == (images / entries[17].name).read_bytes()
    shard(tmp_path / "train-*.parquet", tmp_path / "train", "parquet", 3, threads=2)
    assert open_index(tmp_path / "train").digest == index.digest


def with_names(made: pa.Table, names: list[str], column: str = "label") -> pa.Table:
    """A table that names the classes of a column as Hugging Face's do."""
    features = {column: {"names": names, "_type": "ClassLabel"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    return made.replace_schema_metadata(about)


def test_tables_without_paths_or_names(images, tmp_path):
    made = table(images, ["b", "a"] * 12, paths=False)
    parquet.write_table(made, tmp_path / "0.parquet")
    listing = open_source("parquet", tmp_path / "0.parquet").listing()
    assert listing.class_names == ["a", "b"]
    assert (listing.entries[1].name, listing.entries[1].label) == ("0/00000001.image", 0)
    (tmp_path / "b").mkdir()
    parquet.write_table(made, tmp_path / "b/0.parquet")
    names = [entry.name for entry in open_source("parquet", tmp_path).listing().entries]
    assert len(set(names)) == 48 and {"0/00000000.image", "b/0/00000023.image"} < set(names)


def test_a_column_called_label_counts_before_other_classes(images, tmp_path):
    made = table(images, ["b", "a"] * 12).append_column("camera", pa.array([0, 1] * 12))
    made = with_names(made, ["canon", "nikon"], "camera")
    parquet.write_table(made, tmp_path / "a.parquet")
    assert open_source("parquet", tmp_path / "a.parquet").listing().class_names == ["a", "b"]


TWO = {"image": [b"1", b"2"], "label": [0, 1]}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            [with_names(pa.table(TWO), names) for names in (["owl", "tit"], ["tit", "owl"])],
            r"train-1\.parquet: has other class names",
        ),
        ([with_names(pa.table(TWO), ["owl"])], "labels beyond its 1 class names"),
        ([pa.table(TWO | {"label": [None, 1]})], "1 of 2 rows have no label"),
        ([pa.table(TWO | {"label": [[0], [0, 1]]})], "neither whole numbers nor texts, but list"),
        ([pa.table({"path": ["a.jpg"], "label": ["x"]})], r"no column of images .* path, label"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(tables, message, tmp_path):
    for number, made in enumerate(tables):
        parquet.write_table(made, tmp_path / f"train-{number}.parquet")
    with pytest.raises(UserError, match=message):
        open_source("parquet", tmp_path).listing()


def test_images_that_changed_are_noticed_until_the_advice_is_followed(tmp_path):
    own, out = image_folder(tmp_path / "own", 2, 3), tmp_path / "train"
    shard(own, out, "folder", 1)
    assert changes(out) is None
    (own / "c0/new\u2028.jpg").write_bytes((own / "c0/000.jpg").read_bytes())
    (own / "c1/001.jpg").unlink()
    (own / "c1/002.jpg").write_bytes((own / "c1/000.jpg").read_bytes())
    note = advice(out, changes(out))
    for part in ("added (c0/new\u2028.jpg)", "removed (c1/001.jpg)", "changed (c1/002.jpg) since"):
        assert f"1 file {part}" in note
    subprocess.run(note.partition("shards again after: ")[2], shell=True, check=True)
    assert shard(own, out, "folder", 1) == 6 and changes(out) is None
