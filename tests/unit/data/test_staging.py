import errno
import shutil
import socket
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.data import staging
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.staging import stage
from maect.data.subsets import class_view


def test_a_staged_split_and_a_staged_view_are_the_same(shards, copy, tmp_path):
    out = stage(copy, str(tmp_path))
    shutil.rmtree(copy)
    staged, original = open_index(out), open_index(shards)
    assert staged.digest == original.digest and staged.keys() == original.keys()
    assert [staged.read(i) for i in range(staged.n)] == [original.read(i) for i in range(24)]
    class_view(shards, tmp_path / "view", ["c1"])
    out = stage(tmp_path / "view", str(tmp_path))
    view, staged = open_index(tmp_path / "view"), open_index(out)
    assert all(path.parent == out for path in staged.shards)
    assert [staged.read(i) for i in range(8)] == [view.read(i) for i in range(8)]


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.iterdir()}


def test_staging_again_copies_only_what_is_gone(shards, tmp_path):
    out = stage(shards, str(tmp_path))
    (out / ".lock").unlink()
    before = state(out)
    assert stage(shards, str(tmp_path)) == out
    (out / ".lock").unlink()
    assert state(out) == before
    (out / "train-000001.tar").unlink()  # as a node's clean-up does with old files
    stage(shards, str(tmp_path))
    new = {path.name for path, which in state(out).items() if before.get(path) != which}
    assert new == {"train-000001.tar", ".lock"}
    assert open_index(out).digest == open_index(shards).digest


def test_shards_written_again_are_staged_again(images, tmp_path):
    shard(images, tmp_path / "train", "folder", 3)
    first = stage(tmp_path / "train", str(tmp_path))
    shutil.rmtree(tmp_path / "train")
    shard(images, tmp_path / "train", "folder", 2)  # the same content and digest
    second = stage(tmp_path / "train", str(tmp_path))
    assert second != first and len(open_index(second).shards) == 2


def test_place_is_a_folder_or_a_variable_of_the_node(shards, tmp_path, monkeypatch):
    host = socket.gethostname()
    monkeypatch.delenv("MAECT_NODE", raising=False)
    for storage in ("MAECT_NODE", "$MAECT_NODE", "/tmp/$MAECT_NODE"):
        with pytest.raises(UserError, match=rf"not set on {host}"):
            stage(shards, storage)
    (tmp_path / "7").mkdir()
    monkeypatch.setenv("MAECT_NODE", "7")
    assert stage(shards, f"{tmp_path}/$MAECT_NODE").parent == tmp_path / "7"
    monkeypatch.setenv("MAECT_NODE", str(tmp_path))
    for storage in ("MAECT_NODE", "$MAECT_NODE"):
        assert stage(shards, storage).parent == tmp_path
    with pytest.raises(UserError, match=rf"nowhere: no such folder on {host}"):
        stage(shards, str(tmp_path / "nowhere"))


def test_too_little_room_is_one_message(shards, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(UserError, match=r"needs \d+ MiB more in .* choose another --stage-to"):
            stage(shards, str(tmp_path))

    # A quota shows only while writing.
    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"a part")
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "copyfile", full)
        with pytest.raises(UserError, match=r"cannot stage .*: Disk quota exceeded"):
            stage(shards, str(tmp_path))
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]
    assert open_index(stage(shards, str(tmp_path))).n == 24
