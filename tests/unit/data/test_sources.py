"""What every kind of source is asked for, and what no source may hand on."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from sample_images import image_folder
from test_imagenet import add, picture

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources import SOURCES, open_source
from maect.data.sources.base import Entry, ImageSource, Listing
from maect.experiment import load


class Zip(ImageSource):
    """CLASS/IMAGE in a zip, whose images are no bytes of a file as they are: deflated."""

    kind = "zip"
    about = "a zip of CLASS/IMAGE"

    def list_images(self) -> Listing:
        with zipfile.ZipFile(self.path) as archive:
            names = sorted(archive.namelist())
        classes = sorted({name.split("/")[0] for name in names})
        return Listing([Entry(n, classes.index(n.split("/")[0]), n) for n in names], classes, [])

    def read(self, entry: Entry) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(entry.path)


def test_a_new_kind_is_known_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SOURCES, Zip.kind, Zip)
    images = image_folder(tmp_path / "images", 2, 4)
    with zipfile.ZipFile(tmp_path / "mine.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in images.rglob("*.jpg"):
            archive.write(path, path.relative_to(images))
    file = tmp_path / "mine.yaml"
    file.write_text(f"""
datasets: {{mine: {{splits: {{train: {{images: {tmp_path}/mine.zip, kind: zip, shards: 2}}}}}}}}
runs: {{}}
""")
    split = load(str(file)).datasets["mine"].splits["train"]
    assert split.images is not None
    shard(Path(split.images), tmp_path / "zip", split.kind, split.shards, split="train", threads=2)
    shard(images, tmp_path / "folder", "folder", 2, split="train")
    assert open_index(tmp_path / "zip").digest == open_index(tmp_path / "folder").digest
    from maect.cli import main

    assert main(["shard", "--help"]) == 0
    assert "zip: a zip of CLASS/IMAGE" in " ".join(capsys.readouterr().out.split())


def test_images_beside_the_class_folders_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = image_folder(tmp_path / "images", 2, 4)
    shutil.copy(next(images.rglob("*.jpg")), images / "loose.JPG")
    (images / "README.txt").touch()
    assert len(open_source("folder", images).listing().entries) == 8
    assert f"{images}: left out: 1 image in no class folder" in caplog.text


def test_declarations_need_neither_numpy_nor_torch() -> None:
    code = "import sys, maect.data.sources; print(*{'numpy', 'torch', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_unknown_kinds_and_those_without_images() -> None:
    with pytest.raises(UserError, match="unknown kind of source 'folders'; did you mean 'folder'"):
        open_source("folders", Path())
    with pytest.raises(UserError, match="kind view has no images of its own"):
        open_source("view", Path())
    with pytest.raises(UserError, match="kind folder takes no `labels`"):
        open_source("folder", Path(), Path("labels.txt"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", [".", "..", "../b"])
def test_a_link_to_a_folder_that_it_lies_in_is_refused(target: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "x.jpg").write_bytes(picture(1))
    (tmp_path / "images/a/more").symlink_to(target)
    if target == "../b":  # the same folder twice, side by side, is a choice
        listing = open_source("folder", tmp_path / "images").listing()
        assert [e.name for e in listing.entries] == ["a/x.jpg", "a/more/x.jpg", "b/x.jpg"]
        return
    with pytest.raises(UserError, match=r"a/more: a link to a folder that it lies in"):
        shard(tmp_path / "images", tmp_path / "out", "folder", 1)


@pytest.mark.parametrize("kind", ["folder", "imagenet"])
def test_class_folders_have_names_in_utf8(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.jpg").write_bytes(picture(1))
    with pytest.raises(UserError, match=r"class folder 'caf\\udce9': its name is not UTF-8"):
        shard(tmp_path, tmp_path / "out", kind, 1)
    assert not (tmp_path / "out").exists()


def val_tar(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(names):
            add(tar, name, picture(number))
    path.with_suffix(".txt").write_text("".join(f"{name} 3\n" for name in set(names)))
    return path


def test_members_that_repeat_are_refused(tmp_path: Path) -> None:
    tar = val_tar(tmp_path / "val.tar", ["a.JPEG", "b.JPEG", "a.JPEG"])
    with pytest.raises(UserError, match=r"val\.tar: holds 'a\.JPEG' 2 times"):
        shard(tar, tmp_path / "out", "imagenet_val", 1, labels=tar.with_suffix(".txt"))


@pytest.mark.timeout(60)
def test_a_tar_that_was_cut_between_two_images_is_refused(images: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number in range(3):
            tar.add(images / f"c0/00{number}.jpg", f"{number}.jpg")
    with tarfile.open(tmp_path / "x.tar") as tar:
        cut = tar.getmembers()[2].offset
    whole = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[:cut])
    with pytest.raises(
        UserError, match=r"x\.tar: not a complete tar \(no blocks of zeros"
    ) as fault:
        shard(tmp_path / "x.tar", tmp_path / "out", "webdataset", 1)
    assert "truncate -s +1024" in str(fault.value)
    (tmp_path / "x.tar").write_bytes(whole[:cut] + bytes(1024))
    assert shard(tmp_path / "x.tar", tmp_path / "out", "webdataset", 1) == 2


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(b"\xff" * 10 + b"\xfe\x00", id="back to its own header"),
        pytest.param(b"\x80" + b"\x7f" * 11, id="beyond 2^63"),
        pytest.param(b"00000100000\0", id="beyond the end"),
    ],
)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"Z"])
def test_tars_with_impossible_sizes_end(size: bytes, kind: bytes, tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("a.JPEG").tobuf(tarfile.GNU_FORMAT))
    header[124:136], header[148:157] = size, b" " * 8 + kind
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path = val_tar(tmp_path / "val.tar", ["b.JPEG"])
    with tarfile.open(path) as tar:
        (good,) = tar.getmembers()
    end = good.offset_data + -(-good.size // 512) * 512
    path.write_bytes(path.read_bytes()[:end] + bytes(header) + bytes(1024))
    with pytest.raises(UserError, match=r"val\.tar: not a complete tar") as fault:
        shard(path, tmp_path / "out", "imagenet_val", 1, labels=path.with_suffix(".txt"))
    assert "\n" not in str(fault.value)
