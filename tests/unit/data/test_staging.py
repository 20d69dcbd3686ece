import multiprocessing
import shutil
from pathlib import Path

import pytest

from maect.data.index import open_index
from maect.data.staging import stage
from maect.data.subsets import class_view
from maect.errors import UserError


def test_staged_split_is_the_same(shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(shards, tmp_path / "shared/train"))
    out = stage(copy, tmp_path / "local")
    shutil.rmtree(copy)
    staged, original = open_index(out), open_index(shards)
    assert staged.digest == original.digest
    assert [staged.read(i) for i in range(staged.n)] == [original.read(i) for i in range(24)]


def test_staging_again_copies_nothing(shards: Path, tmp_path: Path) -> None:
    out = stage(shards, tmp_path)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()}
    assert stage(shards, tmp_path) == out
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()} == before


def test_a_view_is_staged_with_its_shards(shards: Path, tmp_path: Path) -> None:
    class_view(shards, tmp_path / "view", ["c1"])
    out = stage(tmp_path / "view", tmp_path / "local")
    original, staged = open_index(tmp_path / "view"), open_index(out)
    assert all(path.parent == out for path in staged.shards)
    assert [staged.read(i) for i in range(8)] == [original.read(i) for i in range(8)]


def test_processes_of_a_node_share_one_copy(shards: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        folders = pool.starmap(stage, [(shards, tmp_path)] * 3)
    assert len(set(folders)) == 1
    assert open_index(folders[0]).n == 24
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_staging_needs(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(UserError, match="TMPDIR is not set"):
        stage(shards)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert stage(shards).is_relative_to(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="MiB free"):
        stage(shards, tmp_path / "other")
