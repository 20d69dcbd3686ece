import errno
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import webdataset
from PIL import Image
from sample_images import encode, flip, image_folder, jpeg, random_crop, write_all

from maect.core import files
from maect.core.errors import UserError
from maect.core.files import read_record, write_record, write_text
from maect.data import decode
from maect.data.changes import changes
from maect.data.index import OFFSET, open_index
from maect.data.shard_check import verify
from maect.data.shards import shard
from maect.data.sources.base import Entry
from maect.data.sources.image_files import Folder
from maect.data.subsets import rows_by_name
from maect.recipes import Pixels


def tree(folder: Path) -> dict[Path, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def original(images: Path, key: str) -> bytes:
    return (images / f"{key}.jpg").read_bytes()


def test_index_gives_the_original_bytes(images, shards):
    index = open_index(shards)
    assert index.n == 24 and index.class_names == ("c0", "c1", "c2")
    assert index.rows[:, 0].tolist() == list(range(24))
    assert sorted(index.keys()) == sorted(f"c{i // 8}/{i % 8:03d}" for i in range(24))
    for i in range(index.n):
        key = index.key(i)
        assert key == index.keys()[i]
        assert index.read(i) == original(images, key)
        assert index.labels[i] == int(key[1])
        with Image.open(io.BytesIO(index.read(i))) as image:
            assert image.size == tuple(index.rows[i, 5:7])
    assert (np.diff(index.labels) == 0).mean() < 0.6  # in order, 21 of 23


def test_a_read_that_returns_less_is_continued(index, monkeypatch):
    whole = [index.read(i) for i in range(4)]
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 700), start))
    assert [index.read(i) for i in range(4)] == whole and min(map(len, whole)) > 700


def test_stock_webdataset_and_plain_tar_read_the_same(shards, index):
    tars = [str(path) for path in index.shards]
    found = list(webdataset.WebDataset(tars, shardshuffle=False).decode("pil", only="cls"))
    assert [s["__key__"] for s in found] == index.keys()
    assert [s["jpg"] for s in found] == [index.read(i) for i in range(index.n)]
    assert [s["cls"] for s in found] == index.labels.tolist()
    with tarfile.open(shards / "train-000000.tar") as tar:
        members = tar.getmembers()
    assert len(members) == 16
    assert {(m.mtime, m.uid, m.uname, m.mode) for m in members} == {(0, 0, "", 0o644)}


def test_threads_change_no_byte_and_the_number_of_shards_no_id(images, shards, tmp_path):
    shard(images, tmp_path / "train", "folder", 3, threads=4)
    assert tree(tmp_path / "train") == tree(shards)
    shard(images, tmp_path / "five/train", "folder", 5)
    a, b = open_index(shards), open_index(tmp_path / "five/train")
    assert a.keys() == b.keys() and a.digest == b.digest
    assert (a.labels == b.labels).all()


def shard_until(stop_at: int, images: Path, out: Path) -> None:
    """Shard, and kill the process when it forces a file to the disk for that time."""
    calls, real = itertools.count(1), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    shard(images, out, "folder", 2)


@pytest.mark.parametrize("stop_at", [1, 5, 8, 11, 16, 20, 22])
def test_killed_anywhere_it_continues(stop_at, images, shards, tmp_path):
    out = tmp_path / "train"
    fork = multiprocessing.get_context("fork")
    job = fork.Process(target=shard_until, args=(stop_at, images, out))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with pytest.raises(UserError):
        open_index(out)
    finished = [out / f"train-{path.stem}.tar" for path in out.glob("parts/*.json")]
    before = [path.stat().st_mtime_ns for path in finished]
    shard(images, out, "folder", 2)
    assert open_index(out).digest == open_index(shards).digest
    assert [path.stat().st_mtime_ns for path in finished] == before
    assert not list(out.rglob(".*.tmp"))


def test_only_one_job_works_in_a_folder(images, tmp_path, monkeypatch):
    out, other = tmp_path / "train", image_folder(tmp_path / "images", 2, 2)

    def meanwhile(*_: object) -> None:
        planned = tree(out)
        with pytest.raises(UserError, match="another maect shard is at work here"):
            shard(other, out, "folder", 2)
        assert tree(out) == planned
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maect.data.shards._write_tar", meanwhile)
        with pytest.raises(KeyboardInterrupt):
            shard(images, out, "folder", 2)
    assert shard(images, out, "folder", 2) == 24  # a lock ends with who held it


@pytest.mark.parametrize("damage", ["cut", "flip", "fewer"])
def test_a_damaged_part_of_the_index(damage, images, tmp_path):
    out = tmp_path / "train"
    shard(images, out, "folder", 2)
    (out / "index.json").unlink()  # as if the job was killed before it wrote the index
    part = out / "parts/000001.npz"
    whole = part.read_bytes()
    if damage == "fewer":
        with np.load(part) as values:
            np.savez(part, rows=values["rows"][:-1], content=values["content"])
    elif damage == "flip":
        flip(part, 600)
    else:
        part.write_bytes(whole[:-50])
    with pytest.raises(UserError, match=r"^\S+000001\.npz: damaged .* delete it and \S+01\.tar"):
        shard(images, out, "folder", 2)
    assert not (out / "index.json").exists()
    part.unlink()
    assert shard(images, out, "folder", 2) == 24 and part.read_bytes() == whole


def test_only_a_lost_or_cut_tar_is_written_again(images, shards, tmp_path):
    out = tmp_path / "train"
    assert shard(images, out, "folder", 3) == 24
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    assert shard(images, out, "folder", 3) == 24
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    (out / "train-000001.tar").unlink()
    tar = out / "train-000002.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(UserError, match="train-000001"):
        open_index(out)
    shard(images, out, "folder", 3)
    assert tree(out) == tree(shards)


@pytest.mark.parametrize("change", ["image", "shards", "option"])
def test_finished_shards_of_another_plan_are_not_overwritten(change, tmp_path):
    source = image_folder(tmp_path / "images", per_class=2)
    out = tmp_path / "out"
    shard(source, out, "folder", 2)
    before = tree(out)
    if change == "image":
        (source / "c0/new.jpg").write_bytes(jpeg(random_crop(np.random.default_rng(1))))
    side = 50 if change == "option" else None
    with pytest.raises(UserError, match="choose another folder"):
        shard(source, out, "folder", 1 if change == "shards" else 2, shorter_side=side)
    assert tree(out) == before


def test_unreadable_images_are_named_before_training(tmp_path):
    source, out = image_folder(tmp_path / "images"), tmp_path / "out"
    whole = (source / "c0/001.jpg").read_bytes()
    odd = source / "c0" / os.fsdecode(b"caf\xe9.jpg")  # a name that is not UTF-8
    odd.write_bytes(b"")
    (source / "c0/001.jpg").write_bytes(whole[: len(whole) // 2])
    (source / "c1/002.jpg").write_bytes(b"")
    (source / "c2/003.jpg").write_bytes(b"<html>404</html>")
    names = ["c0/001.jpg", "c0/caf\\udce9.jpg", "c1/002.jpg", "c2/003.jpg"]
    with pytest.raises(UserError, match="4 unreadable"):
        shard(source, out, "folder", 2)
    listed = (out / "unreadable.txt").read_text().splitlines()
    assert sorted(line.partition("\t")[0] for line in listed) == names
    odd.write_bytes(whole)  # repaired: the plan holds
    with pytest.raises(UserError, match="3 unreadable") as fault:
        shard(source, out, "folder", 2)
    text = str(fault.value)
    assert "\n" not in text and names[0] in text and not list(out.glob("index.*"))

    # The list of what is unreadable can be used as it is.
    bad = (out / "unreadable.txt").read_text()
    # A new choice of images is a new plan; nothing was finished that it could contradict.
    hint = re.search(r"listed again: (.*)", text)
    assert hint
    subprocess.run(hint[1], shell=True, check=True)
    write_text(out / "unreadable.txt", bad)
    assert shard(source, out, "folder", 2, exclude=out / "unreadable.txt") == 22
    excluded = json.loads((out / "index.json").read_text())["excluded"]
    assert excluded == [names[0], *names[2:]] and (out / "unreadable.txt").exists()


def test_begun_with_other_files_it_is_begun_anew(tmp_path):
    """Images were repaired, or are others of the same names: none of before is kept."""
    source, out = image_folder(tmp_path / "images"), tmp_path / "out"
    whole = (source / "c0/001.jpg").read_bytes()
    (source / "c0/001.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="1 unreadable"):
        shard(source, out, "folder", 2)
    assert len([*out.glob("*.tar")]) == 1
    for path in source.rglob("*.jpg"):
        path.write_bytes(whole)
    shard(source, out, "folder", 2)
    index = open_index(out)
    assert {index.read(i) for i in range(index.n)} == {whole} and changes(out) is None


def test_a_file_system_that_fails_for_a_moment_loses_no_image(tmp_path, monkeypatch):
    """With `skip_unreadable` what could not be read once was left out for good."""
    source, read, left = image_folder(tmp_path / "images"), Folder.read, [2]
    monkeypatch.setattr(files, "WAITS", (0.0, 0.0))

    def stale(self: Folder, entry: Entry) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, entry)

    monkeypatch.setattr(Folder, "read", stale)
    options = {"skip_unreadable": True}
    assert shard(source, tmp_path / "out", "folder", 1, **options) == 24
    left[0] = 100
    with pytest.raises(UserError, match=r"\.jpg: Stale file handle; start again, or `exclude`"):
        shard(source, tmp_path / "other", "folder", 1, **options)
    left[0] = 0
    monkeypatch.setattr(decode, "_open", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match=r"\.jpg: too little memory to decode it"):
        shard(source, tmp_path / "other", "folder", 1, **options)


def test_unreadable_images_can_be_left_out(tmp_path):
    source, out = image_folder(tmp_path / "images"), tmp_path / "out"
    (source / "c0/000.jpg").write_bytes(b"")
    names = [f"c{label}/{number:03d}.jpg" for label in range(3) for number in range(7)]
    (tmp_path / "only.txt").write_text("\n".join([*names, "c1/gone.jpg"]))
    with pytest.raises(UserError, match=r"only\.txt: 'c1/gone\.jpg' is not in the source"):
        shard(source, out, "folder", 2, only=tmp_path / "only.txt")
    (tmp_path / "listed.txt").write_text("c0/000.jpg\nc0/002.jpg\n")
    with pytest.raises(UserError, match=r"and their names from .*/listed\.txt, and have"):
        shard(source, tmp_path / "refused", "folder", 1, only=tmp_path / "listed.txt")
    how = {"only": tmp_path / "only.txt", "skip_unreadable": True}
    assert shard(source, out, "folder", 2, **how) == 20
    index = open_index(out)
    assert index.record["unreadable"] == ["c0/000.jpg (empty file)", "c1/gone.jpg (gone)"]
    assert index.record["unlisted"] == 3
    assert index.rows[:, 0].tolist() == list(range(20)) == [*range(index.n)]
    assert all(index.read(i) == original(source, key) for i, key in enumerate(index.keys()))
    assert verify(out) == 20
    # Neither the number of shards nor what cannot be read decides who is who.
    shard(source, tmp_path / "other", "folder", 5, **how)
    assert open_index(tmp_path / "other").digest == index.digest


NAMES = [f"c{label}/00{number}.jpg" for label in range(2) for number in range(2)]
"""Images of the folder that the refusals below begin with."""
BANDS = Pixels(channels=5, mean=(0.5,) * 5, std=(0.5,) * 5)


def empty(source: Path) -> None:
    shutil.rmtree(source)
    source.mkdir()


@pytest.mark.parametrize(
    ("prepare", "arguments", "message"),
    [
        (shutil.rmtree, {}, "no such file or folder"),
        (empty, {}, "no class folders"),
        (empty, {"kind": "unlabelled"}, "no images found"),
        (lambda p: (p / "cat").mkdir(), {}, "cat: class folder without images"),
        (None, {"kind": "picture_book"}, "unknown kind"),
        (None, {"kind": "blur", "pixels": BANDS}, "kind blur changes pictures .* have 5 channels"),
        (None, {"shards": 5}, "5 shards for 4 images; lower the number"),
        (None, {"shards": 2, "only": NAMES[:1]}, "2 shards for 1 images; lower the number"),
        (None, {"exclude": ["c0/none.jpg"]}, "'c0/none.jpg' is not in the source"),
        (None, {"exclude": b"caf\xe9.jpg\n"}, "not a text file"),
        (None, {"exclude": Path("none.txt")}, r"none\.txt: No such file"),
        (None, {"only": []}, r"only\.txt: no image of \S+images is left; correct the"),
        (None, {"only": ["c0/gone.jpg"], "skip_unreadable": True}, r"only\.txt: no image of"),
        (None, {"exclude": NAMES}, r"exclude\.txt: no image of \S+images is left; correct the"),
        (None, {"only": NAMES[:1], "exclude": NAMES}, r"only\.txt and \S+exclude\.txt: no image"),
    ],
)  # fmt: skip
def test_refusals(prepare, arguments, message, tmp_path):
    source = image_folder(tmp_path / "images", 2, 2)
    if prepare is not None:
        prepare(source)
    given = {"kind": "folder", "shards": 1} | arguments
    for name in arguments.keys() & {"only", "exclude"}:
        if isinstance(given[name], Path):
            continue
        lines = given[name]
        data = lines if isinstance(lines, bytes) else "".join(f"{n}\n" for n in lines).encode()
        given[name] = tmp_path / f"{name}.txt"
        given[name].write_bytes(data)
    with pytest.raises(UserError, match=message):
        shard(source, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_names_that_tars_and_webdataset_do_not_like(tmp_path):
    """They are told apart, and found by the names that they had."""
    odd = ("1.2.jpg", "back\\slash.jpg", "tab\there.jpg", "ü ß.jpeg", "deep/er/y.JPG")
    names = [f"c/{name}" for name in ("a.b.c.jpg", "a_b_c.jpg", "x" * 120 + ".jpg", *odd)]
    images = {name: encode(Image.new("RGB", (8, 8 + n)), "JPEG") for n, name in enumerate(names)}
    shard(write_all(tmp_path / "images", images), tmp_path / "out", "folder", 1)
    index = open_index(tmp_path / "out")
    keys = index.keys()
    stock = list(webdataset.WebDataset(str(index.shards[0]), shardshuffle=False))
    assert [s["__key__"] for s in stock] == keys == [index.key(i) for i in range(len(names))]
    assert [s["jpg"] for s in stock] == [index.read(i) for i in range(len(names))]
    assert len(set(keys)) == len(names) and "c/back_slash" in keys
    for name, data in images.items():
        (row,) = rows_by_name(keys, [name], index.directory)
        assert index.read(row) == data


def test_links_are_followed_and_what_is_no_image_is_counted(tmp_path):
    source = image_folder(tmp_path / "images", 1, 2)
    shutil.copytree(source / "c0", tmp_path / "more")
    (source / "c0/more").symlink_to(tmp_path / "more")
    (source / "c0/readme.txt").write_text("hello")
    (source / "c0/.hidden.jpg").write_text("hello")
    assert shard(source, tmp_path / "out", "folder", 1) == 4
    record = json.loads((tmp_path / "out/index.json").read_text())
    assert record["ignored"] == {"count": 1, "suffixes": {".txt": 1}, "first": ["c0/readme.txt"]}


def test_unlabelled_images(tmp_path):
    source = image_folder(tmp_path / "images", 2, 2)
    shutil.copy(source / "c0/000.jpg", source / "alone.jpg")
    shard(source, tmp_path / "out", "unlabelled", 1)
    index = open_index(tmp_path / "out")
    assert index.labels.tolist() == [-1] * 5 and index.class_names == ()
    assert "alone" in index.keys() == [index.key(i) for i in range(5)]
    stock = list(webdataset.WebDataset(str(index.shards[0]), shardshuffle=False))
    assert all("cls" not in sample for sample in stock)


def test_recompression_is_an_option_named_in_the_index(tmp_path):
    source = image_folder(tmp_path / "images")
    shard(source, tmp_path / "out", "folder", 2, shorter_side=40)
    index = open_index(tmp_path / "out")
    assert index.record["options"] == {"shorter_side": 40}
    shortest = index.rows[:, 5:7].min(1)
    assert shortest.max() == 40 and shortest.min() < 40  # smaller ones stay as they came
    for i in range(index.n):
        untouched = index.read(i) == original(source, index.key(i))
        assert untouched == (min(Image.open(source / f"{index.key(i)}.jpg").size) <= 40)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "index.npy").unlink(), "index.npy"),
        (lambda d: (d / "index.npy").write_bytes(b"x"), "index.npy"),
        (lambda d: (d / "index.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "train-000000.tar").write_bytes(b""), "0 bytes"),
        (lambda d: flip(d / "index.npy"), "index.npy: changed since it was written"),
    ],
)
def test_a_damaged_folder_is_not_opened(damage, message, copy):
    damage(copy)
    with pytest.raises(UserError, match=message):
        open_index(copy)


def test_changed_names_are_not_read(copy):
    index = open_index(copy)
    flip(copy / "keys.txt")
    with pytest.raises(UserError, match=r"keys\.txt: changed since it was written"):
        index.keys()
    (copy / "keys.txt").unlink()
    with pytest.raises(UserError, match=r"keys\.txt: No such file"):
        index.keys()


def test_labels_without_a_class_are_found(copy):
    record = read_record(copy / "index.json")
    write_record(copy / "index.json", record | {"class_names": record["class_names"][:-1]})
    with pytest.raises(UserError, match="labels beyond the class names"):
        verify(copy)


def test_the_name_in_a_damaged_header_can_be_printed(copy):
    index = open_index(copy)
    with open(index.shards[0], "r+b") as file:
        file.seek(int(index.rows[0, OFFSET]) - 512)
        file.write(b"c0/\n\xff.jpg".ljust(100, b"\0"))
    assert index.key(0).isprintable() and index.key(0).startswith("c0/\\n")


def test_shards_are_closed_with_their_index(copy):
    def opened() -> set[Path]:
        paths = (path.resolve() for path in Path("/proc/self/fd").iterdir())
        return {path for path in paths if path.parent == copy and path.suffix == ".tar"}

    index = open_index(copy)
    assert all(index.read(i) for i in range(index.n))
    assert opened() == set(index.shards)
    del index
    assert not opened()


def test_an_index_is_made_again_if_a_tar_was_written_again(tmp_path):
    """Bitmaps that were edited in place: every size and name is as it was."""
    out, digests = tmp_path / "out", []
    for level in (0, 99):
        pictures = (Image.new("RGB", (8, 8), (number, 0, level)) for number in range(4))
        bitmaps = {f"a/{number}.bmp": encode(one, "BMP") for number, one in enumerate(pictures)}
        (out / "out-000000.tar").unlink(missing_ok=True)
        shard(write_all(tmp_path / "images", bitmaps), out, "folder", 1)
        digests.append(open_index(out).digest)
    assert digests[0] != digests[1] and verify(out) == 4
